"""The client daemon: one loop that carries out what the session decides, with one connection, one worker and files.

    transport ──events──> Session ──instructions──> transfers      parts and the update (`transfers`)
                                                    worker         its process (`worker_control`)
                                                    files          what survives a restart (`lease_files`)
                                                    link           messages to the coordinator (`link`)

Covers: the loop and its end. Does not cover: deciding (`session`; of deployed models `deploying`), training
(`edge_client.worker`), starting over after a full disk (`run_daemon`). Never imports torch or numpy: it stays below
28 MB. One thread and one loop; any error of the disk but a full one ends the process with a clear line, because a sync
that failed once cannot be trusted to succeed the second time.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from edge_client import __version__, faults, logs
from edge_client.client import workers
from edge_client.client.accelerator_profile import with_accelerator
from edge_client.client.connection_log import ConnectionLog
from edge_client.client.events import Event, LinkDown, LinkUp, Tick, WorkerFailed
from edge_client.client.identity import Bundle
from edge_client.client.instructions import (
    BeginSession,
    Fetch,
    Forget,
    Instruction,
    Remember,
    Save,
    Send,
    Serve,
    Start,
    Stop,
)
from edge_client.client.lease_files import LeaseFiles
from edge_client.client.link import CoordinatorLink
from edge_client.client.model_delivery import ModelDelivery
from edge_client.client.parts import PartsOnDisk
from edge_client.client.session import Session
from edge_client.client.status_report import LastMoments, StatusReport
from edge_client.client.supervisor import Supervisor
from edge_client.client.transfers import ClientTransfers
from edge_client.client.worker_control import WorkerControl
from edge_client.config.device_file import DeviceFile
from edge_client.config.task_files import AllowedTasks
from edge_client.device.profile import measure
from edge_client.device.worker_group import WorkerGroup
from edge_client.errors import PayloadError
from edge_client.transport.base import Connected, Disconnected, Received, Transport
from edge_client.transport.base import Event as TransportEvent
from edge_client.wire.messages import Cancel, Deploy, Deployed, Hello, Message, Receipt, Refuse, Share, Welcome
from edge_client.wire.topics import Topics

__all__ = ["ConnectTo", "Daemon"]

log = logging.getLogger(__name__)

_IDLE_S = 1.0
_SENDING_S = 0.02  # the longest wait while chunks of the update wait for the transport

ConnectTo = Callable[[Callable[[TransportEvent], None], str], Transport]  # (on_event, boot id)


class Daemon:
    """One client on one state directory, from start to stop."""

    def __init__(
        self,
        *,
        bundle: Bundle,
        device_file: DeviceFile,
        state_dir: Path,
        connect: ConnectTo,
        worker_command: Sequence[str] = workers.COMMAND,
        template_command: Sequence[str] = (),
        root: Path = Path("/"),
        group: WorkerGroup | None = None,
        supervisor: Supervisor | None = None,
        context: logs.Context | None = None,
    ) -> None:
        """`worker_command` starts a worker, `template_command` what workers are forks of (empty: nothing).

        `root` holds the system's `/proc` and `/sys`, by which memory is measured; `group` takes the worker.

        `supervisor` hears of every turn of the loop; lines of the log get the run in hand through `context`.
        """
        self._topics = Topics(bundle.federation)
        self._state_topic = self._topics.device(bundle.device, "state")
        self._boot = secrets.token_hex(8)
        self._tasks = AllowedTasks(device_file.tasks)
        self._supervisor = supervisor or Supervisor()
        self._moments = LastMoments()
        self._files = LeaseFiles(state_dir, disk_limit_bytes=device_file.limits.disk)
        saved, profile = self._files.saved, measure(device_file.limits.memory, root=root)
        profile = with_accelerator(profile, device_file.limits)
        self._session = Session(
            boot=self._boot,
            profile=profile,
            labels=dict(device_file.labels),
            client=__version__,
            assign=saved.assign,
            update=saved.finished,
            attempts=saved.attempts,
            replans=saved.replans,
            highest=saved.highest,
        )
        if context is not None:
            context.look = self._run_in_hand
        self._events: deque[Event] = deque()
        self._waiting_start: Start | None = None  # while a deployed model is tested
        self._stopping = False
        self._coordinator_epoch = b""
        self._transport = connect(self._on_transport, self._boot)
        self._connection = ConnectionLog(
            device=bundle.device, num_brokers=len(bundle.brokers), note_error=self._moments.note_error
        )
        self._link = CoordinatorLink(
            device=bundle.device,
            topics=self._topics,
            key=bundle.key_bytes(),
            transport=self._transport,
            complete_hello=self._complete_hello,
        )
        self._transfers = ClientTransfers(
            device=bundle.device,
            topics=self._topics,
            transport=self._transport,
            store=PartsOnDisk(self._files.blobs),
            send=self._link.send,
            is_online=lambda: self._session.online,
            on_event=self._events.append,
        )
        self._worker = WorkerControl(
            device=bundle.device,
            device_file=device_file,
            files=self._files,
            budget_bytes=profile.budget_bytes,
            note_error=self._moments.note_error,
            command=worker_command,
            template_command=template_command,
            root=root,
            group=group,
        )
        self._delivery = ModelDelivery(
            state_dir=state_dir,
            is_allowed=device_file.limits.deploy,
            usual_bytes=profile.budget_bytes,
            files=self._files,
            transfers=self._transfers,
            worker=self._worker,
            send=self._send_if_online,
        )
        self._status = StatusReport(
            state_dir / "status.json",
            session=self._session,
            connection=self._connection,
            worker=self._worker,
            moments=self._moments,
        )
        self._transport.subscribe(self._topics.device_subscribes(bundle.device))

    def _run_in_hand(self) -> tuple[str, int]:
        assign = self._session.assign
        return (assign.run, assign.round) if assign is not None else ("", 0)

    def _complete_hello(self, hello: Hello) -> Hello:
        return replace(hello, tasks=self._tasks.hashes(), deploys=True)

    def _send_if_online(self, deployed: Deployed) -> None:
        if self._session.online:
            self._link.send(deployed)

    # the loop

    def request_stop(self) -> None:
        """Ask the loop to end, from any thread, and stop the worker at once: the loop may wait for the network."""
        self._stopping = True
        self._worker.stop()
        self._transport.wake()

    def run(self) -> None:
        """Serve until `request_stop`."""
        try:
            self.start()
            self._supervisor.ready()
            while not self._stopping:
                self.turn()
            self._supervisor.stopping()
            self._carry_out(self._session.goodbye())
        finally:
            self.shut_down()

    def start(self) -> None:
        """Continue from the state on disk, and begin to connect."""
        self._delivery.resume()
        self._files.clean_up(self._session.assign, other_parts=self._delivery.parts)
        self._carry_out(self._resume())
        self._transport.connect()

    def _resume(self) -> list[Instruction]:
        assign = self._session.assign
        if assign is None:
            return []
        faults.in_round(assign.round)
        event = self._files.event_since_stop(assign)
        if event is None:
            return self._session.begin()
        instructions = self._session.handle(event, time.monotonic())
        return [*instructions, *self._session.begin()] if isinstance(event, WorkerFailed) else instructions

    def turn(self) -> None:
        """Wait for the next event, and handle everything that is due."""
        fds = [*self._worker.fds, *self._delivery.fds]
        ready = self._transport.poll(self._longest_wait(), fds)
        if self._stopping:
            return  # a worker that ended now was stopped
        self._events.extend(self._worker.read(ready))
        self._delivery.read(ready, time.monotonic())
        self._start_waiting()
        self._delivery.continue_deployment(time.monotonic(), may_test=not self._worker.is_running)
        self._worker.watch(time.monotonic())
        self._session.free_bytes = self._files.free_bytes()
        self._events.append(Tick())
        self._handle_events()
        self._transfers.turn()
        if self._status.is_due(time.monotonic()):
            self._report()
        self._supervisor.alive(time.monotonic())

    def _longest_wait(self) -> float:
        if self._events:
            return 0.0
        wait_s = max(0.0, min(self._session.next_due() - time.monotonic(), _IDLE_S))
        return min(wait_s, _SENDING_S) if self._transfers.is_sending else wait_s

    def _handle_events(self) -> None:
        while self._events:
            self._carry_out(self._session.handle(self._events.popleft(), time.monotonic()))

    def _report(self) -> None:
        """Report to people and to the coordinator what may have changed outside of the loop."""
        session = self._session
        self._connection.warn_of_silence(time.monotonic(), is_online=session.online, refusal=session.refusal)
        if session.online and session.assign is None and self._tasks.changed():  # or no run would take this device
            log.info("the file of a task has changed; telling the coordinator")
            self._carry_out(session.say_hello(time.monotonic()))
        self._supervisor.doing(self._status.write(time.monotonic()))

    def shut_down(self) -> None:
        """End everything within SIGTERM's ten seconds: the worker gets five of them, the transport two."""
        self._delivery.close()
        self._worker.shut_down()
        self._transport.close()
        self._status.write_stopped(time.monotonic())
        self._transfers.close()

    # what the transport brings

    def _on_transport(self, event: TransportEvent) -> None:
        match event:
            case Connected():
                self._connection.connected(time.monotonic())
                self._transport.publish(self._state_topic, b"online", retain=True)
                self._events.append(LinkUp())
            case Disconnected():
                self._connection.lost(event)
                self._transfers.lost_connection(event.code)
                self._events.append(LinkDown())
            case Received():
                try:
                    self._receive(event)
                except PayloadError as error:
                    log.warning("dropped a message on %s: %s", event.topic, error)

    def _receive(self, received: Received) -> None:
        topic, payload = received.topic, received.payload
        if topic == self._topics.coordinator_state:
            self._take_coordinator_state(payload, retained=received.retained)
        elif not self._transfers.receive(topic, payload):
            message = self._link.receive(topic, payload)
            if message is not None:
                self._take(message)

    def _take_coordinator_state(self, payload: bytes, *, retained: bool) -> None:
        """Say hello to a coordinator that may not know this device: it has another epoch, or was disconnected.

        The state is not authenticated. A retained one is older than our hello on this connection, and needs no answer.
        """
        epoch = payload[:64]
        if epoch.startswith(b"online"):
            changed = self._coordinator_epoch not in (b"", epoch)
            self._coordinator_epoch = epoch
            if not retained and (changed or not self._session.online):
                self._carry_out(self._session.say_hello(time.monotonic()))

    def _take(self, message: Message) -> None:
        """Pass a message to the part that handles it, for most the session."""
        if isinstance(message, Share):
            self._transfers.share(message)
            return
        if isinstance(message, Deploy):
            self._delivery.deploy(message)
            return
        if isinstance(message, Refuse) and message.boot == self._boot:  # a copy of this device hears it too
            self._connection.refused(message)
        elif isinstance(message, Receipt):
            self._moments.note_receipt(message, self._session.assign)
        self._events.append(message)
        if isinstance(message, Cancel):
            self._delivery.cancel(message.lease)
        elif isinstance(message, Welcome):  # what was read together with it belongs to the session that it begins
            self._handle_events()

    # what the session wants

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(message):
                    self._link.send(message)
                case BeginSession(session):
                    self._begin_session(session)
                case Save():
                    self._save(instruction)
                case Remember(ceiling):
                    self._files.remember(ceiling)
                case Fetch(part):
                    self._transfers.fetch(part, point="daemon.part")
                case Start():
                    self._start_worker(instruction)
                case Stop(lease):
                    self._worker.stop(lease)
                case Serve():
                    self._serve(instruction)
                case Forget(lease, accepted):
                    self._transfers.close()
                    self._files.forget(lease, accepted=accepted)

    def _begin_session(self, session: str) -> None:
        self._link.begin_session(session)
        self._transfers.begin_session()
        self._connection.welcomed()
        self._delivery.begin_session()

    def _save(self, save: Save) -> None:
        faults.in_round(save.assign.round)
        if self._files.save(save):
            self._worker.prepare(save.assign)
            self._transfers.close_downloads()
            self._files.clean_up(save.assign, other_parts=self._delivery.parts)

    def _start_worker(self, start: Start) -> None:
        """Start the worker now, or after the test of a deployed model: the device's memory is for one of them."""
        if self._delivery.is_testing:
            self._waiting_start = start
        else:
            self._worker.start(start)

    def _start_waiting(self) -> None:
        start, self._waiting_start = self._waiting_start, None
        if start is not None and self._session.assign == start.assign:  # otherwise nobody wants it any more
            self._start_worker(start)

    def _serve(self, serve: Serve) -> None:
        assign = self._session.assign
        assert assign is not None
        if not self._transfers.serve(serve.update, self._files.work_dir(assign.lease), serve.ranges):
            self._events.append(self._files.update_lost(assign.lease))
