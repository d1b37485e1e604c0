"""How a device takes a model that its coordinator deploys: it fetches, tests and installs it, and reports the outcome.

    Deploy ──> fetching ──file here──> testing ──passed──> active      the old one is kept as the previous one
              │                        └──failed──> rolled_back        the old one stays, or is back
              └──the owner forbids it, no onnxruntime──> refused       the old one stays

Rules
  D1  One deployment at a time; a newer one takes the place of one that is under way, also if it is refused.
  D2  What is wanted is on disk before it is fetched: a restart goes on, with the chunks that are here already.
  D3  Nothing is put into its place before it was tested in a process of its own, and nothing is loaded here.
  D4  A test and a worker never run at the same time: the device's memory is for one of them.
  D5  A test that ends its process, takes too long or lacks memory is repeated a few times, also if it takes the client
      with it.
  D6  The outcome of the newest deployment is remembered, and reported again whenever the coordinator asks; after every
      welcome, so is the model in use.
  D7  A full disk passes: nothing is lost, nothing counts as a failure, and the step is repeated. Meanwhile the client
      does its other work, and reports what the model waits for.

Covers: deciding. Does not cover: files (`deployed`), the test's process (`self_test_process`), transfers
(`model_delivery`, which loads this for the first deployment only).
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_client import durable, faults
from edge_client.client import self_test_process
from edge_client.client.deployed import DeployedFolder
from edge_client.client.self_test_process import SelfTest
from edge_client.config.quantities import format_bytes
from edge_client.errors import DiskFullError, InputError, MachineError
from edge_client.measuring import exit_codes
from edge_client.records import PartRef
from edge_client.transport.blobs import BlobStore
from edge_client.wire.messages import Deploy, Deployed

__all__ = ["Deploying", "has_runtime"]

log = logging.getLogger(__name__)

_MAX_TESTS = 3
_LIMIT_S = 180.0  # onnxruntime and a large model on a slow card; a forward pass of four samples
_AGAIN_S = 60.0  # between two tries of what may pass
_FORBIDDEN = "the owner of this device forbids it: limits.deploy = false in device.toml"
_NEEDED = 2  # times the file's length: itself, and the one that it replaces where the disk has no links


def has_runtime() -> bool:
    """Whether onnxruntime is installed; it is not loaded for that, and may have come a moment ago."""
    importlib.invalidate_caches()
    return importlib.util.find_spec("onnxruntime") is not None


class Deploying:
    """The deployments of one device; see the module's docstring for its rules."""

    def __init__(
        self,
        *,
        state_dir: Path,
        blobs: BlobStore,
        is_allowed: bool,
        send: Callable[[Deployed], None],
        budget_bytes: Callable[[], int],
        usual_bytes: Callable[[], int],
        free_bytes: Callable[[], int],
        started: Callable[[int, int], None] = lambda pid, budget: None,
        command: Sequence[str] | None = None,
    ) -> None:
        """`send` may lose a message; `started` gets the process id and the budget of every test.

        `budget_bytes` is the budget now, `usual_bytes` the budget when other programs leave it.
        """
        self._blobs = blobs
        self._is_allowed = is_allowed
        self._send = send
        self._budget_bytes, self._usual_bytes, self._free_bytes = budget_bytes, usual_bytes, free_bytes
        self._started = started
        self._command = self_test_process.COMMAND if command is None else command
        with durable.disk_errors("cannot look at the deployed model"):
            self._files = DeployedFolder(state_dir)
            self._files.repair()
        self._test: SelfTest | None = None
        self._has_less = False  # the test has less memory than usual
        self._forget_progress()
        if self._files.record.wanted is not None and not is_allowed:
            self._failed("forbidden", _FORBIDDEN, state="refused")

    def _forget_progress(self) -> None:
        """Forget the progress of the wanted model."""
        self._reported: Deployed | None = None
        self._may_fetch = False  # there is space for it
        self._unfinished: Callable[[], None] | None = None  # the step for which the disk had no space
        self._waits = False
        self._again_at: float | None = None

    @property
    def wanted(self) -> PartRef | None:
        """The blob of the model that is to be installed next."""
        wanted = self._files.record.wanted
        return PartRef(key="deployed", sha256=wanted.sha256, length=wanted.length) if wanted is not None else None

    @property
    def fetched(self) -> PartRef | None:
        """The wanted blob, if there is space to fetch it now."""
        return self.wanted if self._may_fetch else None

    @property
    def fds(self) -> list[int]:
        """The file descriptor to watch: it becomes readable when the running test ends."""
        return [self._test.fd] if self._test is not None else []

    @property
    def is_testing(self) -> bool:
        """Whether no worker may start now."""
        return self._test is not None

    # what the coordinator asks for

    def greeted(self) -> None:
        """A session has begun: reports of the session before may be lost."""
        record = self._files.record
        newest = record.outcome.deployment if record.outcome is not None else ""
        if record.outcome is not None:
            self._send(record.outcome)
        if record.current is not None and record.current.deployment != newest:
            self._send(_active(record.current))
        self._report_again()

    def _report_again(self) -> None:
        wanted = self._files.record.wanted
        if wanted is not None:
            self._send(self._reported or Deployed(deployment=wanted.deployment, state="fetching"))

    def cancelled(self, deployment: str) -> None:
        """The coordinator does not want a deployment any more."""
        wanted = self._files.record.wanted
        if wanted is not None and wanted.deployment == deployment:
            detail = "the coordinator does not want it any more"
            self._end(Deployed(deployment=deployment, state="refused", code="cancelled", detail=detail))

    def asked(self, deploy: Deploy) -> None:
        """Take a deployment, or report how it stands."""
        record = self._files.record
        if record.wanted is not None and record.wanted.deployment == deploy.deployment:
            self._report_again()
        elif record.outcome is not None and record.outcome.deployment == deploy.deployment:
            self._send(record.outcome)
        elif record.current is not None and record.current.deployment == deploy.deployment:
            self._send(_active(record.current))
        elif (refusal := self._refusal()) is not None:
            self._refuse(deploy, *refusal)
        else:
            self._take(deploy)

    def _refusal(self) -> tuple[str, str] | None:
        """Code and detail if the model is refused before anything is fetched."""
        if not self._is_allowed:
            return "forbidden", _FORBIDDEN
        if not has_runtime():
            return "no_runtime", "onnxruntime is not installed there; type: pip install 'fedfit[infer]'"
        return None

    def _refuse(self, deploy: Deploy, code: str, detail: str) -> None:
        """Refuse a model; the deployment that it was to replace ends as well."""
        reason = f"{detail}; {self._stays()}"
        log.warning("a model of run %s is refused: %s: %s", deploy.run, code, reason)
        refused = Deployed(deployment=deploy.deployment, state="refused", code=code, detail=reason)
        if self._files.record.wanted is None:
            self._send(refused)
        else:
            self._end(refused)

    def _take(self, deploy: Deploy) -> None:
        previous = self._files.record.wanted
        self._stop_test()
        if previous is not None and previous.sha256 != deploy.sha256:
            self._forget_blob(previous)
        self._forget_progress()
        log.info("run %s version %d: to be used on this device", deploy.run, deploy.version)
        try:
            with durable.disk_errors("cannot take a model"):
                is_here = self._files.adopt_current(deploy)
                if not is_here:
                    self._files.set_wanted(deploy)
        except DiskFullError as error:  # the coordinator asks again
            log.warning("it waits: disk_full: %s", error)
            self._send(Deployed(deployment=deploy.deployment, state="fetching", code="disk_full", detail=str(error)))
            return
        faults.point("deployed.wanted")
        if is_here:
            self.greeted()
        else:
            self._report("fetching")

    def _report(self, state: str, code: str = "ok", detail: str = "") -> None:
        """Report how the wanted model stands, unless that was the last report."""
        wanted = self._files.record.wanted
        report = Deployed(deployment=wanted.deployment, state=state, code=code, detail=detail) if wanted else None
        if report is not None and report != self._reported:
            self._reported = report
            self._send(report)

    # what this device does

    def tick(self, now: float, *, may_test: bool) -> None:
        """Do the step that is due: look for space, begin the test if `may_test`, end a test that takes too long."""
        wanted = self._files.record.wanted
        if self._test is not None:
            if self._test.until is None:
                self._test.until = now + _LIMIT_S
            elif now >= self._test.until:
                self._test.kill()
        elif wanted is not None and self._has_waited(now):
            if self._unfinished is not None:
                self._write(self._unfinished)
            elif not self._blobs.verified(wanted.sha256):
                self._look_for_space(wanted)
            elif may_test:
                self._write(self._begin_test)

    def _has_waited(self, now: float) -> bool:
        """False while an obstacle that may pass is given its time, which begins at the first look at the clock."""
        if self._waits and self._again_at is None:
            self._again_at = now + _AGAIN_S
        if self._again_at is not None and now >= self._again_at:
            self._waits, self._again_at = False, None
        return not self._waits

    def _wait(self, code: str, detail: str) -> None:
        """Report an obstacle that may pass, and try again later."""
        self._waits, self._again_at = True, None
        last = self._reported or Deployed(deployment="-", state="fetching")
        if last.code != code:
            log.warning("a deployed model waits: %s: %s", code, detail)
        self._report(last.state, code, detail[:2000])

    def _look_for_space(self, wanted: Deploy) -> None:
        """Allow to fetch the model if the disk has room for it; other programs may still fill the disk meanwhile."""
        if self._may_fetch:
            return
        needed = _NEEDED * wanted.length - self._blobs.arrived_bytes(wanted.sha256)
        if (free := self._free_bytes()) < needed:
            self._wait("disk_full", f"{format_bytes(needed)} are needed on disk and {format_bytes(free)} are free")
        else:
            self._may_fetch = True
            self._report("fetching")

    def disk_is_full(self, error: DiskFullError) -> None:
        """The disk ran full while the model was fetched; the chunks that have arrived stay."""
        self._may_fetch = False
        if self._files.record.wanted is not None:
            self._wait("disk_full", str(error))

    def _write(self, step: Callable[[], None]) -> None:
        """Do a step that writes; it is repeated later if the disk is full."""
        self._unfinished = None
        try:
            with durable.disk_errors("cannot keep a deployed model"):
                step()
        except DiskFullError as error:
            self._unfinished = step
            self._wait("disk_full", str(error))

    def _begin_test(self) -> None:
        wanted = self._files.record.wanted
        assert wanted is not None
        if self._files.record.attempts >= _MAX_TESTS:
            self._failed("crashed", f"{_MAX_TESTS} self-tests began and none came to its end")
            return
        folder, budget = self._files.folder / "test", self._budget_bytes()
        self_test_process.write_job(folder, self._blobs.path(wanted.sha256), wanted, budget)
        self._files.begin_test()  # the last that needs space: what did not begin does not count
        self._test = SelfTest(folder, self._command)
        self._has_less = budget < self._usual_bytes()
        self._started(self._test.pid, budget)
        self._report("testing")
        faults.point("deployed.testing")

    def test_ended(self, now: float) -> None:
        """Take the result of the test, whose `fd` has become readable."""
        test, self._test = self._test, None
        if test is None:
            return
        code, error = test.result()
        late = test.until is not None and now >= test.until
        if code == 0:
            self._write(self._passed)
        elif code == InputError.exit_code:
            self._failed("self_test", error)
        elif code == exit_codes.OVER_BUDGET and self._has_less:
            usual = format_bytes(self._usual_bytes())
            self._lacked_memory(f"{error}; other programs use the memory: usually the budget is {usual}")
        elif code == exit_codes.OVER_BUDGET:
            self._failed("over_budget", error)
        elif code == exit_codes.NO_RUNTIME:
            self._failed("no_runtime", error, state="refused")
        elif code == exit_codes.RESULT_UNWRITTEN:
            self._write(self._result_unwritten)
        elif not late and test.killed_for_memory(code):
            self._lacked_memory("the kernel ended the self-test: there was no memory left")
        else:
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            how = f"took longer than {_LIMIT_S:g} s" if late else f"ended with {ended}"
            log.warning("the self-test of a model %s: %s", how, error or "it said nothing")
            if self._files.record.attempts >= _MAX_TESTS:
                self._failed("crashed", f"the self-test {how}, {_MAX_TESTS} times")

    def _lacked_memory(self, detail: str) -> None:
        """Repeat the test a few times: other programs may release memory, but a model that is too large never fits."""
        if self._files.record.attempts >= _MAX_TESTS:
            self._failed("low_memory", f"{detail}, {_MAX_TESTS} times")
        else:
            self._wait("low_memory", detail)

    def _result_unwritten(self) -> None:
        """Repeat the test, because the disk had no space for its result; it does not count."""
        self._files.end_test(passed=False)
        self._wait("disk_full", "there was no space for what the self-test says")

    def _passed(self) -> None:
        """Install the tested model; this step is repeated if it was interrupted."""
        wanted = self._files.record.wanted
        assert wanted is not None
        self._files.end_test(passed=True)
        faults.point("deployed.tested")
        is_there = self._files.swap(self._blobs.path(wanted.sha256))
        self._blobs.remove(wanted.sha256)
        if is_there:
            log.info("run %s version %d is in use: %s", wanted.run, wanted.version, self._files.current)
        self._forget_progress()
        self.greeted()

    def _failed(self, code: str, detail: str, *, state: str = "rolled_back") -> None:
        wanted = self._files.record.wanted
        assert wanted is not None
        reason = " ".join(f"{detail}; {self._stays()}".split())[:2000]
        log.error("run %s version %d is not used: %s: %s", wanted.run, wanted.version, code, reason)
        self._end(Deployed(deployment=wanted.deployment, state=state, code=code, detail=reason))

    def _stays(self) -> str:
        current = self._files.record.current
        return f"run {current.run} version {current.version} stays in use" if current is not None else "none is in use"

    def _end(self, outcome: Deployed) -> None:
        """End the deployment of the wanted model."""
        self._stop_test()
        self._may_fetch = False
        self._write(lambda: self._write_end(outcome))

    def _write_end(self, outcome: Deployed) -> None:
        wanted = self._files.record.wanted
        assert wanted is not None
        self._forget_blob(wanted)  # first: the disk may be full of it
        self._files.end(outcome)
        self._forget_progress()
        self.greeted()

    def _forget_blob(self, deploy: Deploy) -> None:
        self._blobs.remove(deploy.sha256)
        self._blobs.discard(deploy.sha256)

    def _stop_test(self) -> None:
        test, self._test = self._test, None
        if test is not None:
            test.kill()
            test.result()

    def close(self) -> None:
        """End the test that runs; a test that ends with the client has not failed."""
        if self._test is not None:
            self._stop_test()
            shutil.rmtree(self._files.folder / "test", ignore_errors=True)  # space for the next line, if there is none
            try:
                with durable.disk_errors("cannot write that a self-test was stopped"):
                    self._files.end_test(passed=False)
            except MachineError as error:
                log.error("%s", error)


def _active(deploy: Deploy) -> Deployed:
    return Deployed(deployment=deploy.deployment, state="active")
