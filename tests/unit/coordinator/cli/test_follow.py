"""Watching a run: whom it waits for, and how it ends."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from answers import run_details, run_line, version_result

from coordinator.cli import follow
from coordinator.control import ControlServer
from coordinator.control_messages import DeviceList, ListDevices
from coordinator.run_details import ModelVersion, RunDetails
from edge_client.errors import RunFailedError

Json = dict[str, Any]


@contextlib.contextmanager
def _serving(folder: Path, handle: Callable[[Json], object]) -> Iterator[None]:
    server, over = ControlServer(folder, handle), threading.Event()

    def serve() -> None:
        while not over.is_set():
            server.serve(select.select(server.fds(), [], [], 0.05)[0])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        server.close()


def test_a_coordinator_that_dies_while_it_is_asked_is_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first connection is cut without an answer; whoever watches is told once and gets the second answer."""
    asked: list[str] = []

    def handle(request: Json) -> Json:
        asked.append(request["request"])
        if len(asked) == 1:
            raise ConnectionResetError
        return {"devices": []}

    with _serving(tmp_path, handle):
        assert follow.ask(tmp_path, ListDevices()) == DeviceList(devices=())
    assert asked == ["device-list"] * 2
    assert capsys.readouterr().err.count("waiting for it to come back") == 1


def _shown(num: int, after: int, state: str) -> RunDetails:
    """A run of `num` judged versions, of which those behind `after` are shown."""
    shown = range(after + 1, num)
    return run_details(
        state=state,
        round=num,
        rounds=99,
        models=tuple(ModelVersion(version=version, sha256="", bytes=1, score=0.9) for version in shown),
        evaluations=tuple(version_result(version) for version in shown),
    )


def test_every_result_is_told_once_and_only_what_is_new_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2, 6 and 11 results, then the end, at which everything is asked for once."""
    monkeypatch.setattr(follow, "_POLL_S", 0.0)
    asked: list[tuple[int | None, int | None]] = []

    def handle(request: Json) -> object:
        asked.append((request.get("after"), request.get("newest")))
        num = {1: 2, 2: 6}.get(len(asked), 11)
        after = request.get("after")
        return _shown(num, -1 if after is None else after, "running" if len(asked) < 4 else "finished")

    with _serving(tmp_path, handle):
        assert len(follow.follow(tmp_path, "r-1").evaluations) == 11
    assert asked == [(-1, None), (1, None), (5, None), (10, None), (None, 1000)]
    told = [line.strip().partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == ["before round 1", *(f"after round {number}" for number in range(1, 11))]


def test_a_failed_run_says_whether_a_model_is_left() -> None:
    """Both end a command with code 9; a run that was stopped after a round is no failure."""
    run = run_line(state="failed", reason="why", round=0)
    with pytest.raises(RunFailedError, match=r"^run r-1 failed without a model: why$"):
        follow.check_model(run)
    with pytest.raises(RunFailedError, match=r"^run r-1 failed after round 3, whose model is kept: why$"):
        follow.check_model(replace(run, round=3))
    follow.check_model(replace(run, state="stopped", round=3))
