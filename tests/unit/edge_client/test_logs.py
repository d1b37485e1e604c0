"""Every line says what it is about."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from edge_client import logs
from edge_client.logs import Context, about


def formatted(style: str, context: Context, *args: object, **about_: object) -> str:
    """One line, as the handler of `configure` writes it."""
    formatter = logs._Json(context) if style == "json" else logs._Plain(context)
    record = logging.LogRecord("edge_client.x", logging.WARNING, "", 0, "it is %s", args, None)
    record.__dict__.update(about(**about_))  # type: ignore[arg-type]
    record.created, record.msecs = 1_800_000_000.052, 52.0
    return formatter.format(record)


def test_a_plain_line_has_device_run_and_round() -> None:
    """`-` for what it is not about; what is looked up is as things stand when the line is written."""
    context = Context(device="pi")
    assert " WARNING [pi - -] it is so" in formatted("plain", context, "so")
    context.look = lambda: ("defects-1", 3)
    assert " WARNING [pi defects-1 3] it is so" in formatted("plain", context, "so")
    assert "[d2 other-1 9] " in formatted("plain", context, "so", device="d2", run="other-1", round=9)


def test_a_json_line_is_one_object_in_one_line() -> None:
    """Whatever a device says."""
    line = formatted("json", Context(look=lambda: ("r-1", 2)), 'a "quote"\nand a line')
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2027-01-15T08:00:00.052Z",
        "level": "warning",
        "device": None,
        "run": "r-1",
        "round": 2,
        "logger": "edge_client.x",
        "message": 'it is a "quote"\nand a line',
    }


def test_a_traceback_is_a_part_of_its_json_line() -> None:
    """A bug is found by whoever collects the lines."""
    try:
        raise ValueError("here")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "a bug", (), sys.exc_info())
    assert "ValueError: here" in json.loads(logs._Json(Context()).format(record))["traceback"]


def test_configure_writes_to_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As both `start` commands do."""
    monkeypatch.setattr(logging.root, "handlers", [])
    logs.configure("json", Context(device="pi"))
    logging.getLogger("x").error("hello")
    assert json.loads(capsys.readouterr().err)["device"] == "pi"
