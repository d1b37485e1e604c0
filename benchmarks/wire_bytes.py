"""Bytes on the wire per round against the payload: devices x model x 2, as fp32.

Counted twice: by the coordinator, as MQTT payloads, and by a proxy in front of the broker, as TCP payload bytes of all
devices (MQTT headers and keep-alives too).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.counting_proxy import CountingProxy
from benchmarks.federation import BIG, Federation, run_file, scratch
from benchmarks.figures import Figure

__all__ = ["measure"]

_PARAMETERS = 11_240_596
_LIMITS = {"fp32": 1.03, "fp16": 0.52, "int8": 0.27}


def measure(*, quick: bool) -> list[Figure]:
    """One pair of figures per codec."""
    devices, rounds = (2, 1) if quick else (4, 3)
    figures = []
    for codec, limit in _LIMITS.items():
        counted, seen = _bytes_per_round(codec, devices, rounds)
        payload = 2 * devices * 4 * _PARAMETERS
        figures += [
            Figure(name=f"{codec}: MQTT payload", unit="of fp32", values=(counted / payload,), at_most=limit),
            Figure(name=f"{codec}: TCP", unit="of fp32", values=(seen / payload,), at_most=limit),
        ]
    return figures


def _bytes_per_round(codec: str, devices: int, rounds: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as federation:
        federation.start()
        with CountingProxy(federation.broker_port()) as proxy:
            federation.reroute = f"127.0.0.1:{proxy.port}"
            federation.start_devices(devices, training=False)
            before = proxy.num_bytes
            shown = federation.run(run_file(hidden=BIG, rounds=rounds, devices=devices, codec=codec))
            seen = proxy.num_bytes - before
        counted = sum(device.bytes_up + device.bytes_down for device in shown.devices)
    return counted / rounds, seen / rounds
