"""`edge-client profile`: what people and programs get, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.cli.main import main

TREES = Path(__file__).parents[3] / "profile_trees"
KEYS = [
    *("source", "kind", "model", "machine", "release", "container"),
    *("memory_bytes", "available_bytes", "gpu_memory", "accelerators"),
    *("bandwidth_gb_s", "cores", "cpu_quota", "memory_controller", "limits", "swaps"),
    *("torch", "budget_bytes", "reasons", "notes", "sources"),
]


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["profile", "--format", "json", *arguments]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_the_same_keys_for_every_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """This one, a recorded one, and one that is not at hand; programs depend on them."""
    state = ["--state-dir", str(tmp_path)]
    for arguments in (state, ["--root", str(TREES / "container-v2")], ["--profile", "raspberry-pi-5-8gb"]):
        assert list(_json(capsys, *arguments)) == KEYS


def test_json_tells_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The container's limit with what is left of it: 1 GiB - 250 MB."""
    found = _json(capsys, "--root", str(TREES / "container-v2"))
    assert found["limits"] == [
        {
            "version": 2,
            "group": "/",
            "file": "memory.max",
            "limit_bytes": 1_073_741_824,
            "used_bytes": 250_000_000,
            "headroom_bytes": 823_741_824,
        }
    ]
    assert (found["kind"], found["budget_bytes"], found["cpu_quota"]) == ("container", 823_741_824, 0.5)


def test_the_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    """Every text begins in the same column; further reasons have no name."""
    assert main(["profile", "--root", str(TREES / "jetson-orin-nano-8gb")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "model        NVIDIA Jetson Orin Nano Developer Kit (aarch64, Jetson Linux R36.4.3)"
    assert "budget       4.1 GB for a worker process" in lines
    assert all(line[11:13] == "  " and line[13] != " " for line in lines)


def test_a_device_that_is_not_at_hand_shows_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody should take a general figure for a measured one."""
    assert main(["profile", "--profile", "jetson-orin-nano-8gb"]) == 0
    out = capsys.readouterr().out
    assert "source       reserve: general knowledge, verify" in out
    assert "profile jetson-orin-nano-8gb" in out


def test_the_device_file_limits_this_device_and_others_only_when_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The budget of the recorded Raspberry Pi 4 is 2,631,270,400 (test_profile)."""
    (tmp_path / "device.toml").write_text('limits = { memory = "300MB" }\n')
    state, root = ["--state-dir", str(tmp_path)], ["--root", str(TREES / "raspberry-pi-4")]
    assert _json(capsys, *state)["budget_bytes"] == 300_000_000
    assert _json(capsys, *state, *root)["budget_bytes"] == 2_631_270_400
    assert _json(capsys, *root, "--config", str(tmp_path / "device.toml"))["budget_bytes"] == 300_000_000


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--root", "/nowhere"], 3, "expected a directory that holds /proc, /sys and /etc of a system, got '/nowhere'"),
        (["--root", str(TREES)], 4, "expected MemTotal and MemAvailable in "),
        (["--profile", "pi"], 7, "unknown profile 'pi'; known: jetson-agx-orin-32gb, "),
        (["--profile", "/nowhere/x.toml"], 3, "cannot read /nowhere/x.toml: No such file or directory"),
        (["--config", "/nowhere/device.toml"], 3, "cannot read /nowhere/device.toml: No such file or directory"),
    ],
)
def test_mistakes_have_an_exit_code_and_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    """As docs/reference/exit-codes.md has them."""
    assert main(["profile", *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("edge-client: ")
    assert told in error
    assert error.count("\n") == 1


def test_a_recorded_system_and_a_model_exclude_each_other() -> None:
    """Usage: exit 2."""
    with pytest.raises(SystemExit) as caught:
        main(["profile", "--root", "/", "--profile", "raspberry-pi-5-8gb"])
    assert caught.value.code == 2


def test_neither_the_daemon_nor_the_command_loads_what_is_large() -> None:
    """The daemon measures the device without the command's modules; the command finds torch without loading it."""
    code = """
import sys
from edge_client.client.daemon import measure
measure(None)
heavy = [m for m in ("importlib.metadata", "email", "edge_client.device.report", "pynvml") if m in sys.modules]
from edge_client.cli.main import main
main(["profile", "--state-dir", "/nowhere", "--format", "json"])
print(heavy + [m for m in ("torch", "numpy", "psutil") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
