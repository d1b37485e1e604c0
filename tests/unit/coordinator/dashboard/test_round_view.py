"""Where the time of each device went in the open round, while it goes on."""

from __future__ import annotations

from typing import Any

from coordinator.dashboard.picture import DeviceFacts, RunFacts
from coordinator.dashboard.round_view import RoundView


def _facts(name: str, **changes: Any) -> DeviceFacts:
    fields: dict[str, Any] = {
        "name": name,
        "online": True,
        "suspended": False,
        "client": "1",
        "kind": "host",
        "budget_bytes": 1,
        "labels": (),
        "doing": "working",
        "phase": "train",
        "step": 1,
        "total": 2,
        "loss": None,
        "plan": "",
        "predicted_bytes": 0,
        "lease": f"lease-{name}",
        "lease_state": "accepted",
        "trains": True,
        "code": "",
        "detail": "",
        "moments": (("assign", 0.0), ("accept", 0.5)),
        "phases": (),
    }
    return DeviceFacts(**fields | changes)


def _view(began_at: float = 100.0) -> RoundView:
    view = RoundView()
    view.begin(RunFacts(run="r-1", number=1, attempt=1, phase="RUNNING", began_at=began_at, ends_at=began_at + 60))
    return view


def _spans(
    view: RoundView, facts: DeviceFacts, now: float, seen_at: float | None = None
) -> list[tuple[str, float, float]]:
    return [(span.name, span.begins_s, span.ends_s) for span in view.spans(facts, seen_at, now)]


def test_phases_that_were_seen_follow_each_other_until_now() -> None:
    """Accepted at 0.5 s, fetching was seen at 1 s, training at 3 s; it is 10 s now."""
    view = _view()
    view.note(_facts("a", doing="fetching", phase=""), 101.0)
    view.note(_facts("a", phase="train"), 103.0)
    expected = [("wait", 0.0, 0.5), ("fetch", 0.5, 3.0), ("train", 3.0, 10.0)]
    assert _spans(view, _facts("a"), 110.0) == expected


def test_a_device_that_is_not_heard_is_lost_since_its_last_message() -> None:
    """It trained from 3 s on and was last heard at 6 s."""
    view = _view()
    view.note(_facts("a", phase="train"), 103.0)
    spans = _spans(view, _facts("a", online=False), 110.0, seen_at=106.0)
    assert spans == [("wait", 0.0, 0.5), ("train", 0.5, 6.0), ("lost", 6.0, 10.0)]


def test_of_many_devices_the_slowest_are_listed_and_all_are_counted() -> None:
    """70 are done after 2 s, one still trains after 10 s: at the end 70 are done and 1 trains."""
    view = _view()
    done = (("assign", 0.0), ("accept", 0.5), ("offer", 1.5), ("arrive", 2.0))
    devices = {f"d{n:02}": _facts(f"d{n:02}", lease_state="stored", moments=done) for n in range(70)}
    devices["z"] = _facts("z")
    view.note(devices["z"], 103.0)
    answer = view.answer(devices, {}, 110.0)
    assert answer is not None
    assert (answer.num_devices, answer.num_done, answer.is_complete) == (71, 70, False)
    assert (answer.devices[0].name, len(answer.devices)) == ("z", 10)
    assert answer.area is not None
    assert {name: counts[-1] for name, counts in answer.area.phases.items() if counts[-1]} == {"train": 1, "done": 70}


def test_another_attempt_begins_anew() -> None:
    """What was seen of the attempt before is forgotten."""
    view = _view()
    view.note(_facts("a", phase="evaluate"), 101.0)
    view.begin(RunFacts(run="r-1", number=1, attempt=2, phase="RUNNING", began_at=200.0))
    assert _spans(view, _facts("a"), 205.0) == [("wait", 0.0, 0.5), ("fetch", 0.5, 5.0)]
