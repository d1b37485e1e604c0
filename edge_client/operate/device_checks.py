"""The checks of `edge-client doctor`, in the order in which a person would look.

Covers: each check and the command that solves the problem. Does not cover: how findings are shown (`doctor`).
The checks change nothing and do not disturb a running client: they read its status instead of connecting again.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client import durable
from edge_client.client import connection, identity, status
from edge_client.config.device_file import DeviceFile
from edge_client.config.quantities import format_bytes
from edge_client.device import report
from edge_client.device.probe import find_torch
from edge_client.errors import FedfitError, InputError, MachineError, NothingFitsError
from edge_client.measuring import accelerator_check, plan_options
from edge_client.operate import owner_file, self_check
from edge_client.operate.doctor import Checks, ProblemError, SkippedError

__all__ = ["DeviceChecks", "Subject", "check_clock", "check_writable"]

_NOT_BEFORE_S = 1_767_225_600  # 2026-01-01: this software is younger
_NOT_AFTER_S = 4_102_444_800  # 2100-01-01, the end of every certificate
_DAY_S = 86_400
_LITTLE_DISK_BYTES = 500 * 10**6
_MOST_OF_PREDICTION = 1.1  # of an accelerator: what a plan leaves for its other kernels before it was rehearsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The device to check, and a model that should fit."""

    state_dir: Path
    config: Path | None = None
    model: Sequence[str] = ()  # options of `edge-client plan`; without them the device's first task, or a small model
    root: Path = Path("/")  # for tests: where /proc and /sys are read below


class DeviceChecks:
    """The checks by name."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def known(self) -> Checks:
        """All checks; those on which others depend come first."""
        return {
            "identity": self._identity,
            "device-file": self._device_file,
            "state": self._state,
            "disk": self._disk,
            "clock": lambda: check_clock(self._subject.state_dir / "status.json"),
            "memory": self._memory,
            "control-group": self._control_group,
            "torch": self._torch,
            "accelerator": self._accelerator,
            "data": self._data,
            "model": self._model,
            "broker": self._broker,
        }

    @functools.cached_property
    def _bundle(self) -> identity.Bundle:
        return identity.load_identity(self._subject.state_dir)

    @functools.cached_property
    def _owners(self) -> DeviceFile:
        return owner_file.load(self._subject.config or self._subject.state_dir / "device.toml")

    @functools.cached_property
    def _report(self) -> report.DeviceReport:
        return report.report_system(self._subject.root, self._limit())

    def _limit(self) -> int | None:
        try:
            return self._owners.limits.memory
        except FedfitError:  # another check reports it
            return None

    def _identity(self) -> str:
        path = self._subject.state_dir / "identity" / "bundle.json"
        try:
            bundle = self._bundle
        except InputError as error:
            raise ProblemError(str(error), "edge-client join FILE (the server: coordinator device add NAME)") from error
        with durable.disk_errors(f"cannot look at {path}"):
            mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise ProblemError(f"{path} can be read by others (mode {mode:04o})", f"chmod 600 {shlex.quote(str(path))}")
        return f"{bundle.device} of federation {bundle.federation}"

    def _device_file(self) -> str:
        path = self._subject.config or self._subject.state_dir / "device.toml"
        try:
            device = self._owners
        except (InputError, MachineError) as error:
            raise ProblemError(str(error), f"edit {path}; edge-client config checks it") from error
        tasks = f", {len(device.tasks)} tasks" if device.tasks else ""
        return f"{path}: {device.data.source if device.data else 'no data source'}{tasks}"

    def _state(self) -> str:
        return check_writable(self._subject.state_dir)

    def _disk(self) -> str:
        state_dir, limit = self._subject.state_dir, self._disk_limit()
        with durable.disk_errors(f"cannot look at {state_dir}"):
            free = durable.free_bytes(state_dir)
        if free < _LITTLE_DISK_BYTES:
            raise ProblemError(
                f"{format_bytes(free)} are free below {state_dir}; a device wants three times its model",
                "sudo journalctl --vacuum-size=100M; sudo apt-get clean",
            )
        return f"{format_bytes(free)} free, of which fedfit may use {format_bytes(limit)}"

    def _disk_limit(self) -> int:
        try:
            return self._owners.limits.disk
        except FedfitError:
            return DeviceFile().limits.disk

    def _memory(self) -> str:
        profile = self._report
        if profile.budget_bytes <= 0:
            raise ProblemError("nothing is left for a worker: " + "; ".join(profile.reasons), "edge-client profile")
        return f"{format_bytes(profile.budget_bytes)} for a worker process; edge-client profile tells why"

    def _control_group(self) -> str:
        profile = self._report
        if profile.memory_controller == "off":
            on_pi = profile.kind == "raspberry-pi"
            where = "/boot/firmware/cmdline.txt" if on_pi else ""
            remedy = f"sudo sed -i '1s/$/ cgroup_enable=memory/' {where} && sudo reboot" if on_pi else ""
            raise ProblemError(
                "the kernel's memory controller is off: MemoryMax has no effect, only fedfit's own guard holds",
                remedy or "add cgroup_enable=memory to the kernel's command line and restart",
            )
        if profile.memory_controller in ("none", "hidden"):
            raise SkippedError("no control groups are visible from here; fedfit's own guard holds")
        limit = min((limit.limit_bytes for limit in profile.limits), default=None)
        limit_text = f"at most {format_bytes(limit)}" if limit is not None else "no limit set"
        return f"memory controller {profile.memory_controller}, {limit_text}"

    def _torch(self) -> str:
        build = find_torch()
        if build is None:
            raise ProblemError(f"torch is not installed for {sys.executable}", f"{sys.executable} -m pip install torch")
        try:
            works = self_check.check_torch()
        except MachineError as error:
            remedy = f"{sys.executable} -m pip install --force-reinstall torch (on a Jetson: deploy/jetson/README.md)"
            raise ProblemError(str(error), remedy) from error
        return f"{works.version} works; a process with it takes {format_bytes(works.base_bytes)}"

    def _accelerator(self) -> str:
        profile, build = self._report, find_torch()
        if not profile.accelerators:
            wish = self._wished()
            if wish not in ("none", "auto"):
                return self._train_on(wish)
            if build is not None and build.cuda:
                size = "its CUDA libraries take gigabytes of disk"
                raise ProblemError(
                    f"torch {build.version} was built for CUDA {build.cuda}, and no GPU was found here: {size}",
                    f"{sys.executable} -m pip install --force-reinstall torch "
                    "--index-url https://download.pytorch.org/whl/cpu",
                )
            raise SkippedError("no GPU was found: this device trains on its CPU")
        names = ", ".join(accelerator.name for accelerator in profile.accelerators)
        if build is None or not build.cuda:
            raise ProblemError(
                f"{names}: the installed torch was built without CUDA",
                "deploy/jetson/README.md names it" if profile.kind == "jetson" else "pip install a torch with CUDA",
            )
        works = self_check.check_torch()
        if not works.gpu:
            groups = "sudo usermod -aG video,render $USER, and log in again"
            why = f"torch {works.version} (CUDA {build.cuda}) cannot use it: {works.no_gpu}"
            raise ProblemError(f"{names}: {why}", groups)
        wish = self._wished()
        if wish == "none":
            return f"{works.gpu}, torch built for CUDA {build.cuda}; this device trains on the CPU: limits.accelerator"
        return self._train_on(wish)

    def _train_on(self, wish: str) -> str:
        """Train a few real steps there, and compare what they reserved with what was predicted."""
        try:
            facts = accelerator_check.check(wish, trains=True)
        except (FedfitError, MemoryError) as error:
            raise ProblemError(str(error), "edge-client profile; limits.accelerator of device.toml") from error
        if not facts.name:
            raise SkippedError(f"limits.accelerator is auto, and this device trains on its CPU: {facts.reason}")
        share = round(100 * facts.reserved_bytes / max(1, facts.predicted_bytes))
        text = (
            f"{facts.name} ({facts.fingerprint}): trained a few steps; "
            f"predicted {format_bytes(facts.predicted_bytes)}, "
            f"measured {format_bytes(facts.reserved_bytes)} ({share} %), context {format_bytes(facts.context_bytes)}"
        )
        text += "".join(f"; {user}" for user in facts.users)
        if facts.reserved_bytes > facts.predicted_bytes * _MOST_OF_PREDICTION:
            raise ProblemError(f"{text}: more than predicted", "send this report and the output of edge-client profile")
        return text

    def _wished(self) -> str:
        try:
            return self._owners.limits.accelerator
        except FedfitError:  # another check reports it
            return "none"

    def _data(self) -> str:
        device = self._owners
        if not (device.tasks or (device.data is not None and device.data.source)):
            raise SkippedError("device.toml names neither data nor a task")
        try:
            name = self._bundle.device
        except FedfitError:
            name = "device"
        try:
            samples = self_check.read_samples(name, device)
        except FedfitError as error:
            raise ProblemError(str(error), _data_remedy(device)) from error
        return "; ".join(f"{where}: {count} samples, read one" for where, count in samples.sets)

    def _model(self) -> str:
        from edge_client.measuring import plan_from_options  # loads torch

        words = self._subject.model or self._usual_model()
        parser = argparse.ArgumentParser(prog="edge-client doctor", add_help=False)
        plan_options.add_subject(parser)
        options = parser.parse_args([str(word) for word in words])
        options.budget, options.training_budget, options.profile = str(max(1, self._report.budget_bytes)), None, None
        try:
            subject, choice = plan_from_options.find_plan(options)
        except NothingFitsError as error:
            raise ProblemError(
                f"{' '.join(words)}: {error}", "end other programs, or choose a smaller model; edge-client plan tells"
            ) from error
        peak, budget = format_bytes(choice.plan.predicted_bytes), format_bytes(choice.plan.budget_bytes)
        return f"{subject.run.what} fits: {choice.plan.describe()}; {peak} of {budget}"

    def _usual_model(self) -> Sequence[str]:
        try:
            place = next(iter(self._owners.tasks.values()), None)
        except FedfitError:
            place = None
        if place is None:
            return ("--model", "small-cnn")
        return ("--task", place)

    def _broker(self) -> str:
        state_dir, brokers = self._subject.state_dir, ", ".join(self._bundle.brokers)
        if durable.is_claimed(state_dir):
            client_status = status.summary(state_dir, self._bundle)
            if client_status["link"] not in ("connected", "let_in"):
                error = client_status["error"]["text"] if client_status["error"] else "not connected"
                raise ProblemError(f"{brokers}: the running client says: {error}", "coordinator doctor on the server")
            heard = "" if client_status["link"] == "let_in" else ", but the coordinator has not answered yet"
            return f"{brokers}: the running client is connected{heard}"
        trouble = connection.trouble(self._bundle)
        if trouble is not None:
            raise ProblemError(*trouble)
        return f"{brokers}: reached, and it let this device in"


def _data_remedy(device: DeviceFile) -> str:
    """How to solve a problem with data; most often this user may not read the files."""
    user = _user_name()
    closed = [str(path) for _, path in owner_file.paths(device) if not os.access(path, os.R_OK)]
    if closed and user != "root":
        return f"sudo setfacl -R -m u:{user}:rX {shlex.join(closed)}"
    return "edge-client config shows device.toml; correct the data, or what it says of it"


def _user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def check_writable(state_dir: Path) -> str:
    """Check that files can be made permanent in the directory; raises `ProblemError`."""
    owner = f"sudo chown -R {_user_name()} {shlex.quote(str(state_dir))}"
    try:
        if not durable.is_there(state_dir):
            raise ProblemError(f"{state_dir} does not exist", "edge-client join FILE, or the first start, makes it")
        with tempfile.NamedTemporaryFile(dir=state_dir, prefix=".doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
        mode = state_dir.stat().st_mode & 0o777
    except OSError as error:
        raise ProblemError(f"cannot write below {state_dir}: {error.strerror}", owner) from error
    except MachineError as error:
        raise ProblemError(str(error), owner) from error
    if mode & 0o077:
        remedy = f"chmod 700 {shlex.quote(str(state_dir))}"
        raise ProblemError(f"{state_dir} is open to others (mode {mode:04o})", remedy)
    return f"{state_dir} is ours and can be written"


def check_clock(newest: Path, *, now_s: float | None = None) -> str:
    """Check that the clock is later than this software's release and than `newest`, the last file written."""
    now = time.time() if now_s is None else now_s
    shown, remedy = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now)), "sudo timedatectl set-ntp true"
    if not _NOT_BEFORE_S <= now <= _NOT_AFTER_S:
        raise ProblemError(f"the clock says {shown}: fedfit works, but logs and reports have wrong times", remedy)
    try:
        written = newest.stat().st_mtime
    except OSError:
        return f"{shown} UTC"
    if written > now + _DAY_S:
        day = time.strftime("%Y-%m-%d", time.gmtime(written))
        raise ProblemError(f"the clock says {shown}, but {newest} was written on {day}: it has gone back", remedy)
    return f"{shown} UTC"
