"""What people only look at: lists, runs in detail, timelines; from a store to read and a picture of the federation.

None of it touches what the loop works on, so a thread may answer beside the loop, with a read-only store of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coordinator.control_messages import DeviceList, ListDevices, ListRuns, Request, RunList, ShowRun, ShowTimeline
from coordinator.requests import device_pages, timelines
from coordinator.requests.run_overview import RunOverview
from coordinator.run_details import RunDetails
from coordinator.server.picture import Picture
from coordinator.store.base import Store
from coordinator.store.rows import RunRow
from coordinator.timeline import RunTimeline
from edge_client.errors import NoSuchNameError
from edge_client.transport.blobs import BlobStore

__all__ = ["NEED_PICTURE", "VIEWS", "Views", "find_run"]

NEED_PICTURE: tuple[type[Request[Any]], ...] = (ListDevices, ShowRun)
VIEWS: tuple[type[Request[Any]], ...] = (*NEED_PICTURE, ListRuns, ShowTimeline)


def find_run(store: Store, name: str) -> RunRow:
    """The run that a person names: id, unique prefix or latest; raises `NoSuchNameError`."""
    runs = store.runs.all()
    real = [run for run in runs if not run.dry]
    if name == "latest" and real:
        return real[-1]
    exact = [run for run in runs if run.id == name]
    matching_runs = exact or [run for run in real if run.id.startswith(name)]
    if len(matching_runs) > 1:
        several = ", ".join(run.id for run in matching_runs)
        raise NoSuchNameError(f"run {name!r} may be any of {several}; name one of them, or latest")
    if not matching_runs or not name:
        raise NoSuchNameError.of("run", name, [run.id for run in real])
    return matching_runs[0]


class Views:
    """Answers what `VIEWS` ask."""

    def __init__(self, store: Store, picture: Picture | None, blobs: BlobStore) -> None:
        """Only `NEED_PICTURE` need a picture."""
        self._store = store
        self._picture = picture
        self._overview = RunOverview(store, picture, blobs)
        self._answers: Mapping[type[Request[Any]], Callable[[Any], object]] = {
            ListDevices: self._devices,
            ListRuns: self._runs,
            ShowRun: self._run,
            ShowTimeline: self._timeline,
        }

    def answer(self, request: Request[Any]) -> object:
        """The record of the answer; raises a `FedfitError` that the person gets to read."""
        return self._answers[type(request)](request)

    def _devices(self, request: ListDevices) -> DeviceList:
        assert self._picture is not None
        return device_pages.page(self._picture, request)

    def _runs(self, request: ListRuns) -> RunList:
        return RunList(runs=tuple(self._overview.line(run) for run in self._store.runs.all() if not run.dry))

    def _run(self, request: ShowRun) -> RunDetails:
        run = find_run(self._store, request.run)
        if request.after is not None:
            return self._overview.news(run, after=request.after)
        return self._overview.details(run, newest=request.newest, report=request.report)

    def _timeline(self, request: ShowTimeline) -> RunTimeline:
        run = find_run(self._store, request.run)
        return timelines.of_run(self._store, run.id, newest=request.newest, number=request.round)
