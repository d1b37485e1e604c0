"""A coordinator's answer as a record."""

from __future__ import annotations

from typing import Any

from answers import abandoned_round, device_evaluation, failed_lease, run_details, run_device, version_result
from rows import round_row, run_file

from coordinator.requests.run_overview import moved_by_round
from coordinator.results.run_record import (
    DeviceRecord,
    FailureRecord,
    LeftOutRecord,
    RoundRecord,
    RunRecord,
    from_answer,
)
from coordinator.results.similarity_record import Similarity
from coordinator.run_details import LeftOut, ModelVersion, RoundTraffic, RoundUpdates
from edge_client.records import DeviceProfile

FILE = run_file()
JUDGED: dict[str, Any] = {"accuracy": 0.5, "balanced_accuracy": 0.4, "macro_f1": 0.3, "loss": 1.5}
JUDGED |= {"num_samples": 10, "num_devices": 1, "recall": (0.25, None), "per_architecture": {"full": 0.5}}
DEVICE: dict[str, Any] = {"budget_bytes": 10, "plan": "full", "predicted_bytes": 0, "peak_bytes": 9}
DEVICE |= {"inside_budget": True, "replans": 2, "num_samples": 7, "num_test": 3, "bytes_up": 1, "bytes_down": 2}


def test_an_answer_becomes_a_record() -> None:
    """Versions and rounds come together; a device's own result is with its version, whatever it is called."""
    details = run_details(
        state="finished",
        reason="end",
        round=2,
        best_version=2,
        file=FILE,
        evaluations=(version_result(2, **JUDGED),),
        device_evaluations=(
            device_evaluation(version=2, device="a", num_samples=4, accuracy=0.75),
            device_evaluation(version=2, device="b", num_samples=0, accuracy=None),
            device_evaluation(version=2, device="server", num_samples=4, accuracy=0.5),
        ),
        devices=(run_device(**DEVICE),),
        failures=(failed_lease(device="b", round=2, state="late", code="c", detail="d", log=("l",)),),
        round_rows=(abandoned_round(reason="too few"),),
        models=(ModelVersion(version=2, sha256="ab", bytes=1, score=None),),
        created_s=5,
        environment={"a": 1},
        moved_by_round=tuple(RoundTraffic(round=number, bytes_up=number, bytes_down=3) for number in (1, 2)),
        updates_by_round=(RoundUpdates(round=1, num_updates=4),),
        whole_model_bytes=100,
        similarity={"problem": "round 1: why"},
        left_out=(LeftOut(device=None, round=2, code="e", detail="f"),),
    )
    assert from_answer(details) == RunRecord(
        name="r-1",
        file=FILE,
        state="finished",
        reason="end",
        num_rounds=2,
        best=2,
        created_s=5,
        rounds=[
            RoundRecord(number=1, bytes_up=1, bytes_down=3, num_updates=4),
            RoundRecord(
                number=2,
                **JUDGED,
                per_device={"a": 0.75, "server": 0.5},
                bytes_up=2,
                bytes_down=3,
                num_updates=0,
            ),
        ],
        devices=[DeviceRecord(**{**DEVICE, "predicted_bytes": None}, name="a")],
        failures=[
            FailureRecord(device="b", round=2, state="late", code="c", detail="d", log=("l",)),
            FailureRecord(device="all", round=1, state="abandoned, try 1", detail="too few"),
        ],
        left_out=[LeftOutRecord(device="", round=2, code="e", detail="f")],
        environment={"a": 1},
        model_sha256="ab",
        whole_model_bytes=100,
        similarity=Similarity(problem="round 1: why"),
    )


def test_the_server_is_no_device() -> None:
    """What it judges on its own test data is in the round's numbers only."""
    file = run_file(evaluate={"on": "npz:/data/test.npz"})
    by_server = device_evaluation(version=2, device="server", num_samples=4, accuracy=0.75)
    details = run_details(file=file, evaluations=(version_result(2, **JUDGED),), device_evaluations=(by_server,))
    (judged,) = from_answer(details).rounds
    assert (judged.accuracy, judged.per_device) == (0.5, {})


def test_a_device_tells_its_machine() -> None:
    """Its model, else what kind it is, and its versions."""
    jetson = run_device(
        profile=DeviceProfile(budget_bytes=1, machine="Jetson", kind="jetson"), versions={"torch": "2.13"}
    )
    host = run_device(profile=DeviceProfile(budget_bytes=1))
    devices = from_answer(run_details(devices=(jetson, host))).devices
    assert [device.machine for device in devices] == ["Jetson, torch 2.13", "host"]


def test_bytes_of_a_round_are_what_was_added_since_the_one_before() -> None:
    """100, then 250 in all: 150 in round 2; round 4 is not told of, because nobody knows what was there before it."""
    totals = {1: (100, 10), 2: (250, 30), 4: (400, 40)}
    rows = [round_row(number, state="ANNOUNCED", bytes_up=u, bytes_down=d) for number, (u, d) in totals.items()]
    rows.insert(1, round_row(2, state="ABANDONED"))
    rows.insert(3, round_row(3, state="ANNOUNCED"))
    assert moved_by_round(rows) == [
        RoundTraffic(round=1, bytes_up=100, bytes_down=10),
        RoundTraffic(round=2, bytes_up=150, bytes_down=20),
    ]
