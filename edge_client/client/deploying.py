"""How a device takes a model that its coordinator deploys: fetched, tested, put into its place, told.

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
  D6  What became of the newest deployment is remembered, and said again whenever the coordinator asks; so is what is
      in use, after every welcome.
  D7  A full disk passes: nothing is lost, nothing counts as a failure, and it is tried again. The client goes on with
      all else meanwhile, and says what it waits for.

Covers: deciding, and the test's process. Does not cover: files (`deployed`), transfers (`daemon`). Loaded by the daemon
for the first deployment only.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_client import durable, faults
from edge_client.client.deployed import DeployedFolder
from edge_client.config.files import format_bytes
from edge_client.device.watch import count_oom_kills, killed_for_memory
from edge_client.errors import DiskFullError, InputError, MachineError
from edge_client.measuring import exit_codes
from edge_client.records import PartRef, to_map
from edge_client.transport.blobs import BlobStore
from edge_client.wire.messages import Deploy, Deployed

__all__ = ["COMMAND", "Deploying", "SelfTest", "has_runtime"]

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "edge_client.onnx.self_test")  # the job's and the result's file follow
_MAX_TESTS = 3
_LIMIT_S = 180.0  # onnxruntime and a large model on a slow card; a forward pass of four samples
_AGAIN_S = 60.0  # between two tries of what may pass
_FORBIDDEN = "the owner of this device forbids it: limits.deploy = false in device.toml"
_NEEDED = 2  # times the file's length: itself, and the one that it replaces where the disk has no links


def has_runtime() -> bool:
    """Whether onnxruntime is installed; it is not loaded for that, and may have come a moment ago."""
    importlib.invalidate_caches()
    return importlib.util.find_spec("onnxruntime") is not None


class SelfTest:
    """A running test; the end of `fd` says that it has ended."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        """Of the job that `write_job` has put there."""
        self._result = folder / "result.json"
        self._oom_kills = count_oom_kills()
        self.until: float | None = None
        self.fd, end = os.pipe()
        environment = {"FEDFIT_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        try:
            with open(folder / "log.txt", "wb") as said:
                self._process = subprocess.Popen(
                    [*command, str(folder / "job.json"), str(self._result)],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    pass_fds=(end,),
                    env={**os.environ, **environment},
                )
        except OSError:
            os.close(self.fd)
            raise
        finally:
            os.close(end)

    @staticmethod
    def write_job(folder: Path, file: Path, deploy: Deploy, budget_bytes: int) -> None:
        """In an empty folder of its own."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        job = {"file": str(file), "deploy": to_map(deploy), "budget_bytes": budget_bytes}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        (folder / "log.txt").touch()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def result(self) -> tuple[int, str]:
        """How it ended: its exit code, and what it said."""
        os.close(self.fd)
        code = self._process.wait()
        try:
            told = json.loads(self._result.read_bytes()).get("error", "")
        except (OSError, ValueError, AttributeError):
            told = ""
        return code, str(told)[:1500]

    def killed_for_memory(self, code: int) -> bool:
        """Whether the kernel ended it for want of memory; `kill` was not called."""
        return killed_for_memory(code, self._oom_kills)


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
        """`send` may lose what it is given; `started` is told the process and the budget of every test.

        `budget_bytes` is what there is now, `usual_bytes` what there is when other programs leave it.
        """
        self._blobs = blobs
        self._is_allowed = is_allowed
        self._send = send
        self._budget_bytes, self._usual_bytes, self._free_bytes = budget_bytes, usual_bytes, free_bytes
        self._started = started
        self._command = COMMAND if command is None else command
        with durable.disk_errors("cannot look at the deployed model"):
            self._files = DeployedFolder(state_dir)
            self._files.mend()
        self._test: SelfTest | None = None
        self._has_less = False  # the test has less memory than usual
        self._forget_progress()
        if self._files.record.wanted is not None and not is_allowed:
            self._failed("forbidden", _FORBIDDEN, state="refused")

    def _forget_progress(self) -> None:
        """Of what is wanted."""
        self._said: Deployed | None = None
        self._may_fetch = False  # there is space for it
        self._rest: Callable[[], None] | None = None  # what the disk had no space for
        self._waits = False
        self._again_at: float | None = None

    @property
    def wanted(self) -> PartRef | None:
        """The blob that is needed."""
        wanted = self._files.record.wanted
        return PartRef(key="deployed", sha256=wanted.sha256, length=wanted.length) if wanted is not None else None

    @property
    def fetched(self) -> PartRef | None:
        """The same, if there is space for it now."""
        return self.wanted if self._may_fetch else None

    @property
    def fds(self) -> list[int]:
        """What to watch."""
        return [self._test.fd] if self._test is not None else []

    @property
    def is_testing(self) -> bool:
        """Whether no worker may start now."""
        return self._test is not None

    # what the coordinator says

    def greeted(self) -> None:
        """A session has begun: what was said in the one before may be lost."""
        record = self._files.record
        ended = record.outcome.deployment if record.outcome is not None else ""
        if record.outcome is not None:
            self._send(record.outcome)
        if record.current is not None and record.current.deployment != ended:
            self._send(_active(record.current))
        self._say_again()

    def _say_again(self) -> None:
        wanted = self._files.record.wanted
        if wanted is not None:
            self._send(self._said or Deployed(deployment=wanted.deployment, state="fetching"))

    def cancelled(self, deployment: str) -> None:
        """Nobody wants it any more."""
        wanted = self._files.record.wanted
        if wanted is not None and wanted.deployment == deployment:
            detail = "the coordinator does not want it any more"
            self._end(Deployed(deployment=deployment, state="refused", code="cancelled", detail=detail))

    def asked(self, deploy: Deploy) -> None:
        """Take a deployment, or say how it stands."""
        record = self._files.record
        if record.wanted is not None and record.wanted.deployment == deploy.deployment:
            self._say_again()
        elif record.outcome is not None and record.outcome.deployment == deploy.deployment:
            self._send(record.outcome)
        elif record.current is not None and record.current.deployment == deploy.deployment:
            self._send(_active(record.current))
        elif (why := self._refusal()) is not None:
            self._refuse(deploy, *why)
        else:
            self._take(deploy)

    def _refusal(self) -> tuple[str, str] | None:
        """Code and detail of what is known before anything is fetched."""
        if not self._is_allowed:
            return "forbidden", _FORBIDDEN
        if not has_runtime():
            return "no_runtime", "onnxruntime is not installed there; type: pip install 'fedfit[infer]'"
        return None

    def _refuse(self, deploy: Deploy, code: str, detail: str) -> None:
        """The coordinator does not want what is under way any more either: that is over, too."""
        said = f"{detail}; {self._stays()}"
        log.warning("a model of run %s is refused: %s: %s", deploy.run, code, said)
        refused = Deployed(deployment=deploy.deployment, state="refused", code=code, detail=said)
        if self._files.record.wanted is None:
            self._send(refused)
        else:
            self._end(refused)

    def _take(self, deploy: Deploy) -> None:
        before = self._files.record.wanted
        self._stop_test()
        if before is not None and before.sha256 != deploy.sha256:
            self._forget_blob(before)
        self._forget_progress()
        log.info("run %s version %d: to be used on this device", deploy.run, deploy.version)
        try:
            with durable.disk_errors("cannot take a model"):
                is_here = self._files.adopt_current(deploy)
                if not is_here:
                    self._files.want(deploy)
        except DiskFullError as error:  # the coordinator asks again
            log.warning("it waits: disk_full: %s", error)
            self._send(Deployed(deployment=deploy.deployment, state="fetching", code="disk_full", detail=str(error)))
            return
        faults.point("deployed.wanted")
        if is_here:
            self.greeted()
        else:
            self._tell("fetching")

    def _tell(self, state: str, code: str = "ok", detail: str = "") -> None:
        """How what is wanted stands, once."""
        wanted = self._files.record.wanted
        said = Deployed(deployment=wanted.deployment, state=state, code=code, detail=detail) if wanted else None
        if said is not None and said != self._said:
            self._said = said
            self._send(said)

    # what happens here

    def tick(self, now: float, *, may_test: bool) -> None:
        """Begin a test as soon as there is something to test and nobody else works; look whether one has ended."""
        wanted = self._files.record.wanted
        if self._test is not None:
            if self._test.until is None:
                self._test.until = now + _LIMIT_S
            elif now >= self._test.until:
                self._test.kill()
        elif wanted is not None and self._has_waited(now):
            if self._rest is not None:
                self._do(self._rest)
            elif not self._blobs.verified(wanted.sha256):
                self._look_for_space(wanted)
            elif may_test:
                self._do(self._begin_test)

    def _has_waited(self, now: float) -> bool:
        """False while something that may pass is given its time, from the first look at the clock."""
        if self._waits and self._again_at is None:
            self._again_at = now + _AGAIN_S
        if self._again_at is not None and now >= self._again_at:
            self._waits, self._again_at = False, None
        return not self._waits

    def _wait(self, code: str, detail: str) -> None:
        """What is in the way may pass: say so, and try again later."""
        self._waits, self._again_at = True, None
        before = self._said or Deployed(deployment="-", state="fetching")
        if before.code != code:
            log.warning("a deployed model waits: %s: %s", code, detail)
        self._tell(before.state, code, detail[:2000])

    def _look_for_space(self, wanted: Deploy) -> None:
        """Before it is fetched; on its way other programs may still fill the disk."""
        if self._may_fetch:
            return
        needed = _NEEDED * wanted.length - self._blobs.arrived_bytes(wanted.sha256)
        if (free := self._free_bytes()) < needed:
            self._wait("disk_full", f"{format_bytes(needed)} are needed on disk and {format_bytes(free)} are free")
        else:
            self._may_fetch = True
            self._tell("fetching")

    def disk_is_full(self, error: DiskFullError) -> None:
        """While it was fetched; what has arrived is kept."""
        self._may_fetch = False
        if self._files.record.wanted is not None:
            self._wait("disk_full", str(error))

    def _do(self, step: Callable[[], None]) -> None:
        """Something that writes; it is done again if the disk is full."""
        self._rest = None
        try:
            with durable.disk_errors("cannot keep a deployed model"):
                step()
        except DiskFullError as error:
            self._rest = step
            self._wait("disk_full", str(error))

    def _begin_test(self) -> None:
        wanted = self._files.record.wanted
        assert wanted is not None
        if self._files.record.attempts >= _MAX_TESTS:
            self._failed("crashed", f"{_MAX_TESTS} self-tests began and none came to its end")
            return
        folder, budget = self._files.folder / "test", self._budget_bytes()
        SelfTest.write_job(folder, self._blobs.path(wanted.sha256), wanted, budget)
        self._files.begin_test()  # the last that needs space: what did not begin does not count
        self._test = SelfTest(folder, self._command)
        self._has_less = budget < self._usual_bytes()
        self._started(self._test.pid, budget)
        self._tell("testing")
        faults.point("deployed.testing")

    def test_ended(self, now: float) -> None:
        """The test's end was seen at its `fd`."""
        test, self._test = self._test, None
        if test is None:
            return
        code, told = test.result()
        late = test.until is not None and now >= test.until
        if code == 0:
            self._do(self._passed)
        elif code == InputError.exit_code:
            self._failed("self_test", told)
        elif code == exit_codes.OVER_BUDGET and self._has_less:
            usual = format_bytes(self._usual_bytes())
            self._lacked_memory(f"{told}; other programs use the memory: usually the budget is {usual}")
        elif code == exit_codes.OVER_BUDGET:
            self._failed("over_budget", told)
        elif code == exit_codes.NO_RUNTIME:
            self._failed("no_runtime", told, state="refused")
        elif code == exit_codes.RESULT_UNWRITTEN:
            self._do(self._was_not_heard)
        elif not late and test.killed_for_memory(code):
            self._lacked_memory("the kernel ended the self-test: there was no memory left")
        else:
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            how = f"took longer than {_LIMIT_S:g} s" if late else f"ended with {ended}"
            log.warning("the self-test of a model %s: %s", how, told or "it said nothing")
            if self._files.record.attempts >= _MAX_TESTS:
                self._failed("crashed", f"the self-test {how}, {_MAX_TESTS} times")

    def _lacked_memory(self, detail: str) -> None:
        """It may pass; but a model that is too large never will, and a device is not to suffer for ever."""
        if self._files.record.attempts >= _MAX_TESTS:
            self._failed("low_memory", f"{detail}, {_MAX_TESTS} times")
        else:
            self._wait("low_memory", detail)

    def _was_not_heard(self) -> None:
        """A test whose result found no space: as if it had not been."""
        self._files.end_test(passed=False)
        self._wait("disk_full", "there was no space for what the self-test says")

    def _passed(self) -> None:
        """Put it into its place; again, if that did not come to its end."""
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
        said = " ".join(f"{detail}; {self._stays()}".split())[:2000]
        log.error("run %s version %d is not used: %s: %s", wanted.run, wanted.version, code, said)
        self._end(Deployed(deployment=wanted.deployment, state=state, code=code, detail=said))

    def _stays(self) -> str:
        current = self._files.record.current
        return f"run {current.run} version {current.version} stays in use" if current is not None else "none is in use"

    def _end(self, outcome: Deployed) -> None:
        """What is wanted is so no longer."""
        self._stop_test()
        self._may_fetch = False
        self._do(lambda: self._write_end(outcome))

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
        """End what runs; a test that ends with the client has not failed."""
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
