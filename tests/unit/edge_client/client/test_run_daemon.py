"""A client whose disk is full starts over until there is space."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from device_world import KEY

from edge_client.client import identity

# its first three connections fail for want of space, twice for the same reason
_FULL = """
import logging, sys
from pathlib import Path
from edge_client.client import identity, run_daemon
from edge_client.config.device_file import DeviceFile, LimitsSection
from edge_client.errors import DiskFullError
from edge_client.transport.inproc import Hub

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
run_daemon._DISK_RETRY_S = 0.01
hub, reasons = Hub(), ["no space for x", "no space for x", "no space for y"]

def connect(on_event, boot):
    if reasons:
        raise DiskFullError(reasons.pop(0))
    print("connects", flush=True)
    return hub.transport("d", on_event)

file = DeviceFile(limits=LimitsSection(memory=10**9))
bundle = identity.read_bundle(Path(sys.argv[1]))
run_daemon.run_daemon(bundle=bundle, device_file=file, state_dir=Path(sys.argv[2]), connect=connect)
"""


def test_a_full_disk_is_waited_for_ever_longer_while_the_reason_is_the_same(tmp_path: Path) -> None:
    """Three errors are three lines, then it connects; SIGTERM is an orderly end. The wait is printed as 0 s."""
    bundle = identity.Bundle(federation="fed", device="d", brokers=("mqtt://h",), password="p" * 20, key=KEY)
    identity.write_bundle(tmp_path / "d.join", bundle)
    identity.join(tmp_path / "state", bundle)
    command = [sys.executable, "-c", _FULL, str(tmp_path / "d.join"), str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        while not lines or lines[-1] not in ("connects", ""):
            lines.append(process.stdout.readline().strip())
        process.terminate()
        assert process.wait(20) == 0
    reasons = [match[1] for line in lines if (match := re.fullmatch(r"disk_full: (.*); nothing is lost.*", line))]
    assert reasons == ["no space for x", "no space for x", "no space for y"]
    assert lines[-1] == "connects"
