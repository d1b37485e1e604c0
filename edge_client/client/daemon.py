"""The client daemon: carries out what the session decides, with one connection, one worker and files.

Covers: connecting, transfers both ways, starting and ending the worker, shutting down.
Does not cover: deciding (`session`; of deployed models `deploying`), training (`worker`). Never imports torch or numpy:
it stays below 28 MB.

One thread and one loop. A full disk makes it start over from what is on disk, as after a crash, until there is space;
any other disk error ends it with a clear line (a sync that failed once cannot be trusted to succeed the second time).
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client import __version__, durable, faults, logs
from edge_client.client import workers
from edge_client.client.identity import STATE_KIND, STATE_VERSION, Bundle
from edge_client.client.session import (
    BeginSession,
    Event,
    Fetch,
    Finished,
    Forget,
    Instruction,
    LinkDown,
    LinkUp,
    PartReady,
    Remember,
    Save,
    Send,
    Serve,
    Session,
    Start,
    Stop,
    Tick,
    UpdateLost,
    WorkerFailed,
)
from edge_client.client.spool import Spool
from edge_client.client.status import Moment, Status, StatusFile, in_short, one_line
from edge_client.client.supervisor import Supervisor
from edge_client.config.files import DeviceFile, format_bytes
from edge_client.config.task_files import AllowedTasks
from edge_client.device.profile import measure
from edge_client.device.watch import MemoryWatch
from edge_client.device.worker_group import WorkerGroup
from edge_client.errors import DiskFullError, NetworkError, PayloadError
from edge_client.records import PartRef, to_map
from edge_client.transport.base import Connected, Disconnected, Received, Transport
from edge_client.transport.base import Event as TransportEvent
from edge_client.transport.blobs import BlobStore, Incoming, Outgoing
from edge_client.wire.chunks import CHUNK_BYTES, num_chunks, parse_chunk, peek_chunk, transfer_id
from edge_client.wire.conversation import Conversation
from edge_client.wire.flow_control import PULL_WINDOW_BYTES
from edge_client.wire.messages import Assign, Cancel, Deploy, Hello, Message, Pull, Receipt, Refuse, Share, Welcome
from edge_client.wire.reassembly import expand
from edge_client.wire.topics import Topics

if TYPE_CHECKING:
    from edge_client.client.deploying import Deploying

__all__ = ["Daemon", "run_daemon"]

log = logging.getLogger(__name__)

_SEND_AHEAD_BYTES = 4 * CHUNK_BYTES  # handed to the transport before it has written them
_IDLE_S = 1.0
_SILENCE_S = 60.0  # no welcome for so long after a connect: tell people
_MAX_WARNINGS = 100  # of workers, told by one daemon
_DISK_RETRY_S = 1.0
_LONGEST_DISK_RETRY_S = 60.0
_LAST_RESORT_S = 9.0  # after SIGTERM, of the ten seconds that supervisors give
_LOOK_EVERY_S = 1.0  # at the memory, while a worker runs
_NOTEWORTHY = 0.9  # of the budget that was told last: what is above is the noise of other programs

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
        root: Path = Path("/"),
        group: WorkerGroup | None = None,
        supervisor: Supervisor | None = None,
        context: logs.Context | None = None,
    ) -> None:
        """`root` is where the files are that tell of this device's memory; `group` is where the worker belongs.

        `supervisor` is told of every turn of the loop, `context` where the run in hand is to be looked up.
        """
        self._bundle = bundle
        self._worker_command = worker_command
        self._device_file = device_file
        self._tasks = AllowedTasks(device_file.tasks)
        self._state_dir = state_dir
        self._topics = Topics(bundle.federation)
        self._down_topic, self._shared_topic = self._topics.device(bundle.device, "down"), self._topics.shared_down
        self._conversation = Conversation(federation=bundle.federation, device=bundle.device, key=bundle.key_bytes())
        self._boot = secrets.token_hex(8)
        self._blobs = BlobStore(state_dir / "blobs", state_dir / "tmp")
        self._spool = Spool(state_dir / "state.json")
        saved = self._spool.load()
        self._warned: set[str] = set()
        profile = measure(device_file.limits.memory, root=root)
        self._root = root
        self._group = group
        self._supervisor = supervisor or Supervisor()
        self._memory = MemoryWatch(profile.budget_bytes, limit=device_file.limits.memory, root=root)
        self._budget_bytes = profile.budget_bytes  # as the worker was told last
        self._look_at = 0.0
        self._stall = workers.Stall()
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
            context.look = self._in_hand
        self._incoming: dict[bytes, Incoming] = {}
        self._listens_for = ""  # the blob for which we listen on the shared topic
        self._may_listen = True
        self._outgoing: Outgoing | None = None
        self._send_queue: deque[int] = deque()
        self._worker: workers.Worker | None = None
        self._held_start: Start | None = None  # while a deployed model is tested
        self._deployed_part = ""  # the model that is being fetched
        self._deploying: Deploying | None = None  # of a device that was given a model, or is just being
        self._stopping = False
        self._events: deque[Event] = deque()
        self._coordinator_epoch = b""
        self._was_connected = False
        self._num_refusals = 0
        self._linked_at: float | None = None  # None: not connected
        self._told = ""  # what has been logged once and would only be repeated
        self._status = StatusFile(state_dir / "status.json")
        self._receipt: Moment | None = None
        self._error: Moment | None = None
        if durable.is_there(state_dir / "deployed"):
            self._deploying = self._load_deploying()
        self._clean_up(saved.assign)
        self._transport = connect(self._on_transport, self._boot)
        self._transport.subscribe(self._topics.device_subscribes(bundle.device))

    def _load_deploying(self) -> Deploying:
        from edge_client.client.deploying import Deploying  # most devices never need it

        return Deploying(
            state_dir=self._state_dir,
            blobs=self._blobs,
            is_allowed=self._device_file.limits.deploy,
            send=lambda said: self._send(said) if self._session.online else None,
            budget_bytes=self._budget_to_start_with,
            usual_bytes=lambda: self._session.budget_bytes,
            free_bytes=self._free_bytes,
            started=lambda pid, budget: self._group.take(pid, budget) if self._group is not None else None,
        )

    def _in_hand(self) -> tuple[str, int]:
        assign = self._session.assign
        return (assign.run, assign.round) if assign is not None else ("", 0)

    def request_stop(self) -> None:
        """End the loop soon; from any thread. The worker is told at once: the loop may be waiting for the network."""
        self._stopping = True
        worker = self._worker
        if worker is not None:
            worker.stop(time.monotonic())
        self._transport.wake()

    def run(self) -> None:
        """Serve until `request_stop`."""
        try:
            self._carry_out(self._resume())
            self._transport.connect()
            self._supervisor.ready()
            while not self._stopping:
                self._turn()
            self._supervisor.stopping()
            self._carry_out(self._session.goodbye())
        finally:
            self._shut_down()

    def _resume(self) -> list[Instruction]:
        """Go on with what is on disk; an update that a worker finished just before we died is not trained again."""
        assign, update = self._session.assign, self._session.update
        if assign is None:
            return []
        faults.in_round(assign.round)
        finished = workers.finished_update(self._work_dir(assign.lease))
        if update is not None and finished != update:
            log.error("the finished update of lease %s is not on disk any more; training it again", assign.lease)
            return self._session.handle(UpdateLost(assign.lease), time.monotonic())
        if update is None and finished is not None:
            return self._session.handle(workers.done(assign.lease, finished), time.monotonic())
        failed = workers.left_failure(assign.lease, self._work_dir(assign.lease)) if update is None else None
        if failed is not None:
            return [*self._session.handle(failed, time.monotonic()), *self._session.begin()]
        return self._session.begin()

    def _turn(self) -> None:
        now = time.monotonic()
        tests = self._deploying.fds if self._deploying is not None else []
        fds = [self._worker.progress_fd, *tests] if self._worker else tests
        wait = 0.0 if self._events else max(0.0, min(self._session.next_due() - now, _IDLE_S))
        ready = self._transport.poll(wait if not self._send_queue else min(wait, 0.02), fds)
        if self._stopping:
            return  # a worker that ended now was told to
        if self._worker and (ready or self._worker.overdue(time.monotonic())):
            self._events.extend(self._watch_worker())
        if self._deploying is not None:
            self._watch_deploying(self._deploying, ended=any(fd in ready for fd in tests))
        self._watch_memory(time.monotonic())
        self._watch_stall(time.monotonic())
        self._session.free_bytes = self._free_bytes()
        self._events.append(Tick())
        self._handle_events()
        self._pull()
        self._send_chunks()
        if time.monotonic() >= self._status.due:
            self._tell_silence()
            self._tell_tasks()
            snapshot = self._snapshot()
            self._status.update(snapshot, time.monotonic())
            self._supervisor.doing(in_short(snapshot))
        self._supervisor.alive(time.monotonic())

    def _handle_events(self) -> None:
        while self._events:
            self._carry_out(self._session.handle(self._events.popleft(), time.monotonic()))

    def _tell_silence(self) -> None:
        """A broker that somebody else runs goes on to let in a device that the coordinator has forgotten."""
        waited = self._linked_at is not None and time.monotonic() - self._linked_at > _SILENCE_S
        if waited and not self._session.online and not self._session.refusal and self._told != "silence":
            self._told = "silence"
            log.warning(
                "connected to the broker, but the coordinator does not answer: is it running, and is device %r still "
                "one of its devices, with this bundle? trying again",
                self._bundle.device,
            )

    def _tell_tasks(self) -> None:
        """A device is left out of a run if its hello has another hash: a file that was mended is said at once."""
        if self._session.online and self._session.assign is None and self._tasks.changed():
            log.info("the file of a task has changed; telling the coordinator")
            self._carry_out(self._session.say_hello(time.monotonic()))

    def _snapshot(self) -> Status:
        """How things stand, for people."""
        session, assign, progress = self._session, self._session.assign, self._session.progress
        return Status(
            pid=os.getpid(),
            client=__version__,
            budget_bytes=self._budget_bytes,
            plan=self._worker.plan() if self._worker else "",
            link="connecting" if self._linked_at is None else "let_in" if session.online else "connected",
            state=session.state,
            lease=assign.lease if assign else "",
            run=assign.run if assign else "",
            round=assign.round if assign else 0,
            num_rounds=assign.num_rounds if assign else 0,
            phase=progress.phase,
            step=progress.step,
            total=progress.total,
            loss=progress.loss,
            receipt=self._receipt,
            error=self._error,
        )

    def _note_receipt(self, receipt: Receipt) -> None:
        assign = self._session.assign
        if assign is not None and assign.lease == receipt.lease:
            reason = f" ({receipt.code}: {receipt.detail})" if receipt.status != "accepted" else ""
            self._receipt = _moment(f"run {assign.run}, round {assign.round}: {receipt.status}{reason}")

    def _watch_worker(self) -> list[Event]:
        assert self._worker is not None
        events, ended = self._worker.read()
        if ended:
            faults.point("daemon.worker.ended")
            self._tell_warnings(self._worker.warnings())
            self._worker = None
        return [self._explained(event) if isinstance(event, WorkerFailed) else event for event in events]

    def _explained(self, failed: WorkerFailed) -> WorkerFailed:
        """A failure as people hear of it: here, and at the coordinator as far as the owner allows."""
        if failed.code == "nothing_fits" and self._budget_bytes < self._session.budget_bytes:
            usual = format_bytes(self._session.budget_bytes)
            detail = f"{failed.detail}; other programs use the memory: usually the budget is {usual}"
            failed = replace(failed, code="low_memory", detail=detail)  # it passes: ask again in the next round
        self._error = _moment(f"the worker failed: {failed.code}: {failed.detail}")
        log.warning("the worker failed: %s: %s", failed.code, one_line(failed.detail))
        return failed if self._device_file.share.logs != "none" else replace(failed, log=())

    def _watch_deploying(self, deploying: Deploying, *, ended: bool) -> None:
        """Test a model when no worker runs, and fetch it behind what a worker waits for."""
        now = time.monotonic()
        if ended:
            deploying.test_ended(now)
        held, self._held_start = self._held_start, None
        if held is not None and self._session.assign == held.assign:
            self._start_worker(held)  # held again while the test goes on
        deploying.tick(now, may_test=self._worker is None)
        part = deploying.fetched
        self._drop_deployed(part.sha256 if part is not None else "")
        if part is not None and transfer_id(part.sha256) not in self._incoming:
            self._fetch(part, deployed=True)

    def _drop_deployed(self, wanted: str) -> None:
        """Stop to fetch a model that another one has taken the place of, or that has to wait."""
        if self._deployed_part in ("", wanted):
            return
        incoming = self._incoming.pop(transfer_id(self._deployed_part), None)
        if incoming is not None:
            incoming.close()
        if self._listens_for == self._deployed_part:
            self._leave_shared()
        self._deployed_part = ""

    def _watch_memory(self, now: float) -> None:
        """Tell a worker when others have taken so much memory that it must do with less."""
        if self._worker is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        budget = self._memory.budget_bytes(self._worker.pid)
        if budget < _NOTEWORTHY * self._budget_bytes:
            before, left = format_bytes(self._budget_bytes), format_bytes(budget)
            log.warning("there is less memory: %s are left to the worker, it had %s", left, before)
            self._budget_bytes = budget
            try:
                self._worker.tell_budget(budget)
            except OSError as error:  # it goes on as it is
                log.warning("cannot tell the worker: %s", error)

    def _watch_stall(self, now: float) -> None:
        """A worker that hangs is ended; it counts as one that crashed, and the next one begins anew."""
        if self._worker is not None and self._stall.hangs(self._worker, now):
            log.error("the worker has done nothing for %d minutes: ending it", workers.Stall.AFTER_S // 60)
            self._worker.stop(now)

    def _tell_warnings(self, lines: list[str]) -> None:
        """What workers warn of, each line once: every round finds the same unreadable image."""
        for line in lines:
            if line not in self._warned and len(self._warned) < _MAX_WARNINGS:
                self._warned.add(line)
                log.warning("worker: %s", one_line(line.removeprefix("WARNING ")))

    # what the transport brings

    def _on_transport(self, event: TransportEvent) -> None:
        match event:
            case Connected():
                log.info("connected to the broker")
                self._was_connected = True
                self._linked_at = time.monotonic()
                self._transport.publish(self._topics.device(self._bundle.device, "state"), b"online", retain=True)
                self._events.append(LinkUp())
            case Disconnected():
                self._num_refusals += event.code == "credentials"
                if self._num_refusals >= len(self._bundle.brokers) and not self._was_connected:
                    raise NetworkError(
                        f"the broker does not let device {self._bundle.device!r} in ({event.reason}); "
                        "was it removed? join again with a new bundle: coordinator device add NAME"
                    )
                self._linked_at = None
                self._tell_loss(event)
                if event.code == "subscription" and self._listens_for:  # somebody else's broker: do without
                    self._may_listen = False
                self._lost_connection()
                self._stop_listening()
                self._events.append(LinkDown())
            case Received():
                self._received(event.topic, event.payload)

    def _tell_loss(self, event: Disconnected) -> None:
        """One line per attempt, but for what only a person can mend: that is said once."""
        self._error = _moment(f"not connected ({event.code}): {event.reason}")
        if event.code != "credentials" or not self._was_connected:  # the bundle's other brokers are still to be tried
            log.warning("not connected (%s): %s; trying again", event.code, event.reason)
        elif self._told != event.code:
            self._told = event.code
            log.error(
                "the broker does not let device %r in any more (%s): it was removed or suspended, or has a new bundle; "
                "trying again, ever more rarely, at least once an hour; to mend it, join with a new bundle: "
                "coordinator device add NAME",
                self._bundle.device,
                event.reason,
            )

    def _lost_connection(self) -> None:
        self._send_queue.clear()
        for incoming in self._incoming.values():
            incoming.chunks.lost_connection()

    def _received(self, topic: str, payload: bytes) -> None:
        try:
            if topic == self._topics.coordinator_state:
                self._coordinator_spoke(payload)
            elif topic == self._shared_topic:
                self._shared_chunk(payload)
            elif topic == self._down_topic:
                self._chunk(payload)
            elif topic == self._topics.device(self._bundle.device, "cmd"):
                self._message(payload)
        except PayloadError as error:
            log.warning("dropped a message on %s: %s", topic, error)

    def _coordinator_spoke(self, payload: bytes) -> None:
        """A hint without authority: one with another epoch does not know us yet, and one that was away may."""
        epoch = payload[:64]
        if epoch.startswith(b"online"):
            changed = self._coordinator_epoch not in (b"", epoch)
            self._coordinator_epoch = epoch
            if changed or not self._session.online:
                self._carry_out(self._session.say_hello(time.monotonic()))

    def _message(self, payload: bytes) -> None:
        message = self._conversation.open(payload)
        if isinstance(message, Refuse) and message.boot == self._boot:  # a copy of this device hears it too
            log.warning("the coordinator refuses this device: %s: %s", message.code, message.detail)
            self._error = _moment(f"refused: {message.code}: {message.detail}")
        if isinstance(message, Receipt):
            self._note_receipt(message)
        if isinstance(message, Share):
            self._share(message)
        elif isinstance(message, Deploy):
            self._deploying = self._deploying or self._load_deploying()
            self._deploying.asked(message)
        else:
            self._events.append(message)
        if isinstance(message, Cancel) and self._deploying is not None:
            self._deploying.cancelled(message.lease)
        if isinstance(message, Welcome):  # what was read together with it belongs to the session that it begins
            self._handle_events()

    def _share(self, share: Share) -> None:
        """Begin or end to listen on the shared topic; the answer is in the next pull, or is sent now."""
        incoming = self._incoming.get(transfer_id(share.sha256))
        if share.listen and incoming is not None and self._may_listen:
            self._listens_for = share.sha256
            self._transport.subscribe((self._shared_topic,))
            incoming.chunks.listen()
        else:
            self._stop_listening()
            self._send(Pull(sha256=share.sha256, ranges=()))

    def _stop_listening(self) -> str:
        """What others fetch is not for us. Returns the blob for which we listened."""
        sha256, self._listens_for = self._listens_for, ""
        if sha256:
            self._transport.unsubscribe((self._shared_topic,))
        for incoming in self._incoming.values():
            incoming.chunks.unlisten()
        return sha256

    def _leave_shared(self) -> None:
        """Stop listening, and say so: until then nothing is published there that might be too much for us."""
        sha256 = self._stop_listening()
        if sha256 and self._session.online:
            self._send(Pull(sha256=sha256, ranges=()))

    def _shared_chunk(self, payload: bytes) -> None:
        """Look at the header first: it may be of a blob that others fetch, or here already."""
        place = peek_chunk(payload)
        incoming = self._incoming.get(place[0]) if place is not None else None
        if place is not None and incoming is not None and incoming.chunks.overhear(place[1]):
            self._chunk(payload)

    def _chunk(self, payload: bytes) -> None:
        chunk = parse_chunk(payload)
        incoming = self._incoming.get(chunk.transfer)
        if incoming is None:
            return  # a late one of a part that is here already
        with self._space_for(incoming.chunks.sha256):
            incoming.add(chunk, time.monotonic())
            if incoming.chunks.complete:
                self._part_arrived(chunk.transfer, incoming)

    @contextmanager
    def _space_for(self, sha256: str) -> Iterator[None]:
        """The disk's errors about a part; a deployed model waits for space by itself, all else needs it now."""
        try:
            with durable.disk_errors("cannot store a part"):
                yield
        except DiskFullError as error:
            if self._deploying is None or sha256 != self._deployed_part:
                raise
            self._deploying.disk_is_full(error)

    def _part_arrived(self, transfer: bytes, incoming: Incoming) -> None:
        incoming.finish()  # a wrong hash raises PayloadError and begins again
        incoming.close()
        del self._incoming[transfer]
        self._leave_shared()
        self._events.append(PartReady(incoming.chunks.sha256))

    # what the session wants

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(message):
                    self._send(message)
                case BeginSession(session):
                    self._conversation.begin(session)
                    self._lost_connection()  # what was asked for or granted in the session before will not come
                    log.info("the coordinator let us in")
                    self._told = ""
                    if self._deploying is not None:
                        self._deploying.greeted()
                case Save():
                    self._save(instruction)
                case Remember(ceiling):
                    self._spool.remember(ceiling)
                case Fetch(part):
                    self._fetch(part)
                case Start():
                    self._start_worker(instruction)
                case Stop(lease):
                    if self._worker and self._worker.lease == lease:
                        self._worker.stop(time.monotonic())
                case Serve(update, ranges):
                    self._serve(update, ranges)
                case Forget(lease, accepted):
                    self._forget(lease, accepted)

    def _send(self, message: Message) -> None:
        if isinstance(message, Hello):
            message = replace(message, tasks=self._tasks.hashes(), deploys=True)
        self._transport.publish(self._topics.device(self._bundle.device, "up"), self._conversation.seal(message))
        faults.point(f"daemon.sent.{type(message).__name__.lower()}")

    def _save(self, save: Save) -> None:
        assign, update = save.assign, save.update
        faults.in_round(assign.round)
        before = self._spool.load().assign
        self._spool.save(assign, update, save.attempts, save.replans)
        if update is not None:
            log.info("run %s round %d: finished, %d bytes to send", assign.run, assign.round, update.length)
        elif before is None or before.lease != assign.lease:
            log.info("run %s round %d: assigned (lease %s)", assign.run, assign.round, assign.lease)
            self._clean_up(assign)

    def _clean_up(self, assign: Assign | None) -> None:
        """Keep only what the lease in hand needs; without one, what may serve the next: parts and methods' states."""
        self._close_incoming()
        if assign is not None:
            deployed = self._deploying.wanted if self._deploying is not None else None
            wanted = {part.sha256 for part in (*assign.parts, *((deployed,) if deployed is not None else ()))}
            self._blobs.keep_only(wanted, wanted)
            self._keep_folder("method-state", assign.run)  # one run trains at a time: the others are over
            in_hand = assign.lease if self._session.update is not None else None  # settled, and not forgotten yet
            with durable.disk_errors("cannot keep the method's state"):
                folder = self._state_dir / "method-state" / assign.run
                workers.count_method_state(folder, assign.counted, in_hand=in_hand)
        self._keep_folder("work", assign.lease if assign else None)

    def _keep_folder(self, below: str, name: str | None) -> None:
        for folder in (self._state_dir / below).glob("*"):
            if folder.name != name:
                _remove(folder)

    def _close_incoming(self) -> None:
        self._leave_shared()
        for incoming in self._incoming.values():
            incoming.close()
        self._incoming.clear()

    def _fetch(self, part: PartRef, *, deployed: bool = False) -> None:
        if self._blobs.verified(part.sha256):
            if not deployed:
                self._events.append(PartReady(part.sha256))
            return
        if transfer_id(part.sha256) in self._incoming:
            return  # two parts with the same bytes
        if deployed:
            self._deployed_part = part.sha256
        with self._space_for(part.sha256):
            incoming = Incoming(
                self._blobs,
                part.sha256,
                sha256=part.sha256,
                length=part.length,
                max_window_bytes=PULL_WINDOW_BYTES,
                point="deployed.part" if deployed else "daemon.part",
                sync=False,  # it can be fetched again
            )
            self._incoming[incoming.chunks.transfer] = incoming
            if incoming.chunks.complete:  # all of it arrived before a restart, but it had no name yet
                try:
                    self._part_arrived(incoming.chunks.transfer, incoming)
                except PayloadError as error:
                    log.warning("part %s begins again: %s", part.key, error)

    def _pull(self) -> None:
        if not self._session.online:
            return
        for incoming in self._incoming.values():
            ranges = incoming.chunks.pull(time.monotonic())
            if ranges is not None:
                self._send(Pull(sha256=incoming.chunks.sha256, ranges=ranges, heard=incoming.chunks.heard))
            break  # one part at a time: the window bounds this process's memory

    def _serve(self, update: Finished, ranges: tuple[tuple[int, int], ...]) -> None:
        if self._outgoing is None or self._outgoing.sha256 != update.sha256:
            assert self._session.assign is not None
            lease = self._session.assign.lease
            self._close_outgoing()
            if workers.finished_update(self._work_dir(lease)) != update:
                log.error("the finished update of lease %s is not on disk any more; training it again", lease)
                self._events.append(UpdateLost(lease))
                return
            with durable.disk_errors("cannot read the update"):
                self._outgoing = Outgoing(self._work_dir(lease) / "update.bin", update.sha256, update.length)
        queued = set(self._send_queue)
        try:
            wanted = expand(ranges, num_chunks(update.length))
            self._send_queue.extend(index for index in wanted if index not in queued)
        except PayloadError as error:
            log.warning("dropped a grant: %s", error)

    def _send_chunks(self) -> None:
        topic = self._topics.device(self._bundle.device, "data")
        while self._send_queue and self._outgoing and self._transport.queued_bytes < _SEND_AHEAD_BYTES:
            with durable.disk_errors("cannot read the update"):
                chunk = self._outgoing.chunk(self._send_queue.popleft())
            self._transport.publish(topic, chunk)
            faults.point("daemon.sent.chunk")

    def _start_worker(self, start: Start) -> None:
        assign = start.assign
        if self._deploying is not None and self._deploying.is_testing:
            self._held_start = start
            return
        if self._worker is not None:  # the one we stopped has not ended yet: its lease is over, do not wait for it
            self._worker.kill()
            self._worker = None
        self._budget_bytes = self._budget_to_start_with()
        with durable.disk_errors("cannot prepare the worker"):
            self._worker = workers.start(
                start,
                folder=self._work_dir(assign.lease),
                parts={part.key: str(self._blobs.path(part.sha256)) for part in assign.parts},
                device=self._bundle.device,
                device_file=to_map(self._device_file),
                budget_bytes=self._budget_bytes,
                ceilings=self._spool.ceilings(self._budget_bytes),
                method_state=self._state_dir / "method-state" / assign.run,
                ledger=self._state_dir / "privacy-ledger",
                command=self._worker_command,
                root=self._root,
            )
        if self._group is not None:
            self._group.take(self._worker.pid, self._budget_bytes)
        faults.point("daemon.worker.started")
        less = f", with a smaller plan (try {start.replans + 1})" if start.replans else ""
        log.info("run %s round %d: worker %d started%s", assign.run, assign.round, self._worker.pid, less)

    def _budget_to_start_with(self) -> int:
        """What the coordinator knows of, unless there is much less now."""
        usual, now = self._session.budget_bytes, self._memory.budget_bytes()
        if now >= _NOTEWORTHY * usual:
            return usual
        log.warning("there is less memory: %s are left to a worker, usually %s", format_bytes(now), format_bytes(usual))
        return now

    def _forget(self, lease: str, accepted: bool) -> None:
        self._close_incoming()
        self._close_outgoing()
        with durable.disk_errors("cannot keep the method's state"):
            workers.settle_method_state(self._state_dir / "method-state", lease, accepted=accepted)
        self._spool.forget()
        _remove(self._work_dir(lease))
        log.info("lease %s is over (%s)", lease, "accepted" if accepted else "not used")

    def _close_outgoing(self) -> None:
        self._send_queue.clear()
        if self._outgoing is not None:
            self._outgoing.close()
            self._outgoing = None

    def _work_dir(self, lease: str) -> Path:
        return self._state_dir / "work" / lease

    def _free_bytes(self) -> int:
        return min(durable.free_bytes(self._state_dir), self._device_file.limits.disk)

    def _shut_down(self) -> None:
        """Within SIGTERM's ten seconds: the worker gets five, the transport two."""
        if self._deploying is not None:
            self._deploying.close()
        if self._worker is not None:
            self._worker.stop(time.monotonic())
            self._worker.wait(time.monotonic())
        self._transport.close()
        self._status.update(replace(self._snapshot(), link="stopped"), time.monotonic())
        self._close_outgoing()
        self._close_incoming()


def _remove(folder: Path) -> None:
    import shutil  # brings bz2 and lzma: half a megabyte that an idle client need not hold

    shutil.rmtree(folder, ignore_errors=True)


def _moment(text: str) -> Moment:
    return Moment(text=text[:2000], at_s=time.time())


def run_daemon(
    *,
    bundle: Bundle,
    device_file: DeviceFile,
    state_dir: Path,
    connect: ConnectTo,
    worker_command: Sequence[str] = workers.COMMAND,
    root: Path = Path("/"),
    context: logs.Context | None = None,
) -> None:
    """Run a client until SIGTERM or SIGINT; starts over by itself when the disk was full."""
    lock = durable.claim_state_dir(state_dir, kind=STATE_KIND, version=STATE_VERSION)
    stopped = threading.Event()
    current: list[Daemon] = []

    def stop() -> None:
        stopped.set()
        for daemon in current:
            daemon.request_stop()

    group = WorkerGroup.open(root)
    supervisor = Supervisor.from_environment()
    retry_s, before = _DISK_RETRY_S, ""
    with _at_stop_signals(stop):
        while not stopped.is_set():
            try:
                daemon = Daemon(
                    bundle=bundle,
                    device_file=device_file,
                    state_dir=state_dir,
                    connect=connect,
                    worker_command=worker_command,
                    root=root,
                    group=group,
                    supervisor=supervisor,
                    context=context,
                )
                current[:] = [daemon]
                if not stopped.is_set():
                    daemon.run()
            except DiskFullError as error:
                retry_s = min(2 * retry_s, _LONGEST_DISK_RETRY_S) if str(error) == before else _DISK_RETRY_S
                before = str(error)
                log.error("disk_full: %s; nothing is lost, trying again in %.0f s", error, retry_s)
                _wait(stopped, retry_s, supervisor)
    if group is not None:
        group.remove()
    os.close(lock)


def _wait(stopped: threading.Event, seconds: float, supervisor: Supervisor) -> None:
    """For space on the disk; to wait for that is to get on."""
    supervisor.ready()
    supervisor.doing("the disk is full; waiting for space")
    until = time.monotonic() + seconds
    while not stopped.is_set() and (now := time.monotonic()) < until:
        supervisor.alive(now)
        stopped.wait(min(_IDLE_S, until - now))


@contextmanager
def _at_stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at SIGTERM or SIGINT, and end the process with 0 if it then takes too long.

    A thread waits for them, because the main thread may be inside a call that no signal ends: a name server or a broker
    that does not answer. What matters is on disk at every moment, so the end may come at any.
    """
    heard, tell = os.pipe()
    os.set_blocking(tell, False)
    ended = threading.Event()

    def watch() -> None:
        if os.read(heard, 1):
            stop()
            if not ended.wait(_LAST_RESORT_S):
                os._exit(0)  # without a word: whoever reads the log may be what we wait for

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the byte in the pipe is what counts
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(-1)
        os.close(tell)
        watcher.join()
        os.close(heard)
