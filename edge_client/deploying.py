"""How a device takes a model that its coordinator deploys: fetched, tested, put into its place, told.

    Deploy ──> fetching ──file here──> testing ──passed──> active      the old one is kept as the previous one
              │                        └──failed──> rolled_back        the old one stays, or is back
              └──the owner forbids it, no onnxruntime, no space──> refused

Rules
  D1  One deployment at a time; a newer one takes the place of one that is under way.
  D2  What is wanted is on disk before it is fetched: a restart goes on, with the chunks that are here already.
  D3  Nothing is put into its place before it was tested in a process of its own, and nothing is loaded here.
  D4  A test and a worker never run at the same time: the device's memory is for one of them.
  D5  A test that ends its process, or takes too long, is repeated a few times, also if it takes the client with it.
  D6  What became of the newest deployment is remembered, and said again whenever the coordinator asks.

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
from edge_client.blobs import BlobStore
from edge_client.deployed import DeployedFolder
from edge_client.files import format_bytes
from edge_client.records import PartRef, to_map
from edge_client.wire.messages import Deploy, Deployed

__all__ = ["COMMAND", "Deploying", "SelfTest", "has_runtime"]

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "edge_client.self_test")  # the job's and the result's file follow
_MAX_TESTS = 3
_LIMIT_S = 180.0  # onnxruntime and a large model on a slow card; a forward pass of four samples
_NO_RUNTIME, _OVER_BUDGET, _FAILED = 69, 75, 3
_FORBIDDEN = "the owner of this device forbids it: limits.deploy = false in device.toml"
_NEEDED = 2  # times the file's length: itself, and the one that it replaces where the disk has no links


def has_runtime() -> bool:
    """Whether onnxruntime is installed; it is not loaded for that, and may have come a moment ago."""
    importlib.invalidate_caches()
    return importlib.util.find_spec("onnxruntime") is not None


class SelfTest:
    """A running test; the end of `fd` says that it has ended."""

    def __init__(self, file: Path, deploy: Deploy, *, folder: Path, budget_bytes: int, command: Sequence[str]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        job = {"file": str(file), "deploy": to_map(deploy), "budget_bytes": budget_bytes}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        self._result = folder / "result.json"
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
        free_bytes: Callable[[], int],
        started: Callable[[int, int], None] = lambda pid, budget: None,
        command: Sequence[str] | None = None,
    ) -> None:
        """`send` may lose what it is given; `started` is told the process and the budget of every test."""
        self._blobs = blobs
        self._is_allowed = is_allowed
        self._send = send
        self._budget_bytes, self._free_bytes = budget_bytes, free_bytes
        self._started = started
        self._command = COMMAND if command is None else command
        with durable.disk_errors("cannot look at the deployed model"):
            self._files = DeployedFolder(state_dir)
            self._files.mend()
        self._test: SelfTest | None = None
        self._told = ""  # of what is wanted
        if self._files.record.wanted is not None and not is_allowed:
            self._failed("forbidden", _FORBIDDEN, state="refused")

    @property
    def wanted(self) -> PartRef | None:
        """The blob that is needed."""
        wanted = self._files.record.wanted
        return PartRef(key="deployed", sha256=wanted.sha256, length=wanted.length) if wanted is not None else None

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
        outcome = self._files.record.outcome
        if outcome is not None:
            self._send(outcome)
        self._tell(self._told or "fetching")

    def cancelled(self, deployment: str) -> None:
        """Nobody wants it any more."""
        wanted = self._files.record.wanted
        if wanted is not None and wanted.deployment == deployment:
            self._stop_test()
            self._forget_blob()
            with durable.disk_errors("cannot forget a model"):
                detail = "the coordinator does not want it any more"
                self._files.end(Deployed(deployment=deployment, state="refused", code="cancelled", detail=detail))

    def asked(self, deploy: Deploy) -> None:
        """Take a deployment, or say how it stands."""
        record = self._files.record
        if record.wanted is not None and record.wanted.deployment == deploy.deployment:
            self._tell(self._told or "fetching")
        elif record.outcome is not None and record.outcome.deployment == deploy.deployment:
            self._send(record.outcome)
        elif (refused := self._refusal(deploy)) is not None:
            log.warning("a model of run %s is refused: %s: %s", deploy.run, refused.code, refused.detail)
            self._send(refused)
        else:
            self._take(deploy)

    def _refusal(self, deploy: Deploy) -> Deployed | None:
        """What is known before anything is fetched."""
        needed, free = _NEEDED * deploy.length, self._free_bytes()
        if not self._is_allowed:
            code, detail = "forbidden", _FORBIDDEN
        elif not has_runtime():
            code, detail = "no_runtime", "onnxruntime is not installed there; type: pip install 'fedfit[infer]'"
        elif free < needed:
            told = f"{format_bytes(needed)} are needed on disk and {format_bytes(free)} are free"
            code, detail = "disk_full", told
        else:
            return None
        return Deployed(deployment=deploy.deployment, state="refused", code=code, detail=detail)

    def _take(self, deploy: Deploy) -> None:
        self._stop_test()
        before = self._files.record.wanted
        if before is not None and before.sha256 != deploy.sha256:
            self._forget_blob()
        self._told = ""
        log.info("run %s version %d: to be used on this device", deploy.run, deploy.version)
        with durable.disk_errors("cannot take a model"):
            if self._files.adopt_current(deploy):
                self.greeted()
                return
            self._files.want(deploy)
        faults.point("deployed.wanted")
        self._tell("fetching")

    def _tell(self, state: str) -> None:
        wanted = self._files.record.wanted
        if wanted is not None:
            self._told = state
            self._send(Deployed(deployment=wanted.deployment, state=state))

    # what happens here

    def tick(self, now: float, *, may_test: bool) -> None:
        """Begin a test as soon as there is something to test and nobody else works; look whether one has ended."""
        wanted = self._files.record.wanted
        if self._test is not None:
            if self._test.until is None:
                self._test.until = now + _LIMIT_S
            elif now >= self._test.until:
                self._test.kill()
        elif wanted is not None and may_test and self._blobs.verified(wanted.sha256):
            self._begin_test(wanted)

    def _begin_test(self, wanted: Deploy) -> None:
        if self._files.record.attempts >= _MAX_TESTS:
            self._failed("crashed", f"{_MAX_TESTS} self-tests began and none came to its end")
            return
        budget = self._budget_bytes()
        with durable.disk_errors("cannot test a model"):
            self._files.begin_test()
            self._test = SelfTest(
                self._blobs.path(wanted.sha256),
                wanted,
                folder=self._files.folder / "test",
                budget_bytes=budget,
                command=self._command,
            )
        self._started(self._test.pid, budget)
        self._tell("testing")
        faults.point("deployed.testing")

    def test_ended(self, now: float) -> None:
        """The test's end was seen at its `fd`."""
        test, self._test = self._test, None
        if test is None:
            return
        code, told = test.result()
        if code == 0:
            self._passed()
        elif code == _FAILED:
            self._failed("self_test", told)
        elif code == _OVER_BUDGET:
            self._failed("over_budget", told)
        elif code == _NO_RUNTIME:
            self._failed("no_runtime", told, state="refused")
        else:
            late = test.until is not None and now >= test.until
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            how = f"took longer than {_LIMIT_S:g} s" if late else f"ended with {ended}"
            log.warning("the self-test of a model %s: %s", how, told or "it said nothing")
            if self._files.record.attempts >= _MAX_TESTS:
                self._failed("crashed", f"the self-test {how}, {_MAX_TESTS} times")

    def _passed(self) -> None:
        wanted = self._files.record.wanted
        assert wanted is not None
        with durable.disk_errors("cannot put a model into its place"):
            self._files.end_test(passed=True)
            faults.point("deployed.tested")
            is_there = self._files.swap(self._blobs.path(wanted.sha256))
        self._blobs.remove(wanted.sha256)
        if is_there:
            log.info("run %s version %d is in use: %s", wanted.run, wanted.version, self._files.current)
        self.greeted()

    def _failed(self, code: str, detail: str, *, state: str = "rolled_back") -> None:
        wanted, current = self._files.record.wanted, self._files.record.current
        assert wanted is not None
        stays = f"run {current.run} version {current.version} stays in use" if current is not None else "none is in use"
        log.error("run %s version %d is not used: %s: %s; %s", wanted.run, wanted.version, code, detail, stays)
        said = " ".join(f"{detail}; {stays}".split())[:2000]
        self._forget_blob()
        with durable.disk_errors("cannot write what became of a model"):
            self._files.end(Deployed(deployment=wanted.deployment, state=state, code=code, detail=said))
        self.greeted()

    def _forget_blob(self) -> None:
        wanted = self._files.record.wanted
        if wanted is not None:
            self._blobs.remove(wanted.sha256)
            self._blobs.discard(wanted.sha256)

    def _stop_test(self) -> None:
        test, self._test = self._test, None
        if test is not None:
            test.kill()
            test.result()

    def goodbye(self) -> None:
        """The client ends on purpose: a test that ends with it has not failed."""
        if self._test is not None:
            self._stop_test()
            with durable.disk_errors("cannot write that a test was stopped"):
                self._files.end_test(passed=False)

    def close(self) -> None:
        """End what runs."""
        self._stop_test()
