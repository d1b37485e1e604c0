"""Requests and answers as records and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from answers import device_details, run_details, run_device
from rows import PLAN, run_file

from coordinator.control_messages import (
    AddDevices,
    DeviceDetails,
    GetStatus,
    ListDevices,
    Request,
    ShowDevice,
    ShowRun,
    StartRun,
    parse_answer,
    parse_request,
    request_map,
)
from coordinator.run_details import RunDetails, plain
from edge_client.errors import ConflictError, InputError
from edge_client.records import to_map


def _as_json(data: object) -> object:
    return json.loads(json.dumps(data, default=plain))


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (GetStatus(), {"request": "status"}),
        (ShowRun(run="r-1"), {"request": "run-show", "run": "r-1"}),
        (ShowRun(run="r-1", newest=5), {"request": "run-show", "run": "r-1", "newest": 5}),
        (AddDevices(names=("a", "b"), replace=True), {"request": "device-add", "names": ["a", "b"], "replace": True}),
        (StartRun(file=run_file()), {"request": "run-start", "file": to_map(run_file())}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_request_travels_without_its_defaults_and_comes_back(request_: Request[object], fields: object) -> None:
    """So that an older coordinator understands a command that has a new option."""
    travelled = _as_json(request_map(request_))
    assert travelled == fields
    assert isinstance(travelled, dict)
    assert parse_request(travelled) == request_


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"request": "fly"}, "unknown request 'fly'; known: status, backup, device-add"),
        ({"request": "run-show"}, "request 'run-show': missing run"),
        ({"request": "run-show", "run": "r", "newest": "all"}, "request 'run-show': newest: expected int, got str"),
        ({"request": "status", "verbose": True}, "request 'status': unknown key 'verbose'"),
    ],
)
def test_a_request_that_nobody_can_answer_is_refused_by_name(asked: dict[str, object], message: str) -> None:
    """It may be of a newer command."""
    with pytest.raises(InputError) as caught:
        parse_request(asked)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("report", [False, True])
def test_a_run_comes_back_from_its_json(report: bool) -> None:
    """What is for a report alone is missing otherwise, and what no device told of itself. Plans have later fields."""
    more = {"updates_by_round": (), "whole_model_bytes": 5, "similarity": {}} if report else {}
    details = run_details(devices=(run_device(plan_details=replace(PLAN, private_budget_bytes=7)),), **more)
    travelled = _as_json(details)
    assert isinstance(travelled, dict)
    assert ("similarity" in travelled) == report
    assert "profile" not in travelled["devices"][0]
    answer: RunDetails = parse_answer(ShowRun(run="r-1"), travelled)
    assert answer == details


def test_the_json_of_an_answer_has_the_fields_in_their_order() -> None:
    """`device show --format json`: first what `device list` has as well."""
    travelled = _as_json(device_details())
    assert isinstance(travelled, dict)
    line, more = list(travelled)[:13], list(travelled)[13:]
    assert (line[0], line[-1]) == ("id", "loss")
    assert more == ["labels_given", "labels_own", "profile", "free_bytes", "tasks", "brokers", "deployed", "failures"]
    answer: DeviceDetails = parse_answer(ShowDevice(name="jetson-1"), travelled)
    assert answer == device_details()


def test_an_answer_of_another_version_is_told_as_such() -> None:
    """The command was upgraded, and the coordinator still runs as it was."""
    with pytest.raises(ConflictError, match=r"another version of fedfit \(device-list: missing devices\); start"):
        parse_answer(ListDevices(), {})
