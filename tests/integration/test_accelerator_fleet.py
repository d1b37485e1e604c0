"""A federation over MQTT: a device on its CPU, one on a discrete accelerator, one whose accelerator has its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerated import environment, needs_test_accelerator
from fleet import Fleet, mlp_run

pytestmark = [pytest.mark.broker, *needs_test_accelerator()]

CONTEXT = 30 * 2**20
LIMITS = {
    "cpu": 'accelerator = "none"',
    "discrete": 'accelerator = "fedtest:0", accelerator-memory = "200MB"',
    "unified": 'accelerator = "fedtest:1"',
}


def _device_toml(name: str) -> str:
    """The same samples on all three."""
    return (
        'data = { source = "digits", partition = "iid", part = [0, 3] }\n'
        f'limits = {{ memory = "2GB", reconnect = "2s", {LIMITS[name]} }}\n'
    )


def test_devices_of_all_three_kinds_train_one_model(tmp_path: Path) -> None:
    """Each reports the memory that it has, and stays inside; the coordinator hears of both accelerators.

    One step of plain SGD on the whole batch of the same samples: seeds differ from device to device, formats do not.
    """
    wanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    own = environment()
    variables = {name: own[name] for name in wanted} | {"FEDTEST_CONTEXT": str(CONTEXT)}
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        fleet.add_devices(*LIMITS)
        for name in LIMITS:
            fleet.write_home(name, _device_toml(name))
            fleet.start_device(name, variables)
        shown = fleet.wait_finished(fleet.start_run(mlp_run(rounds=2, devices=3)), 900)
    assert shown["state"] == "finished", shown["reason"]
    devices: dict[str, dict[str, Any]] = {device["id"]: device for device in shown["devices"]}
    assert set(devices) == set(LIMITS)
    assert all(device["inside_budget"] for device in devices.values()), devices

    cpu, discrete, unified = (devices[name] for name in LIMITS)
    assert not cpu.get("accelerator_peak_bytes")
    shown_of_cpu = {**cpu["plan_details"], **cpu["profile"]}
    assert not any(value for key, value in shown_of_cpu.items() if "accelerator" in key)
    assert discrete["profile"]["x-accelerator-memory"] == "separate"
    assert discrete["profile"]["x-accelerator-budget"] == 200 * 10**6
    plan = discrete["plan_details"]
    assert CONTEXT < discrete["accelerator_peak_bytes"] <= plan["x-accelerator-predicted"] <= 200 * 10**6
    assert plan["x-accelerator"].startswith("fedtest, test accelerator (discrete)")
    assert unified["profile"]["x-accelerator-memory"] == "unified"
    assert unified["accelerator_peak_bytes"] > CONTEXT
    assert unified["plan_details"]["predicted_bytes"] <= 2 * 10**9
    assert fleet.unexpected == []
