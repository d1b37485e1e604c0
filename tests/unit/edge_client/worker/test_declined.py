"""Reasons to decline: which error becomes which code."""

from __future__ import annotations

import pytest

from edge_client.data.labels import UnknownClassError
from edge_client.errors import InputError, MachineError, NoSuchNameError, NothingFitsError
from edge_client.worker.declined import DeclinedError, declines, declines_user_method


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("bad"), "bad_model"),
        (NoSuchNameError("what is that"), "unknown_model"),
        (NothingFitsError("too large"), "nothing_fits"),
        (UnknownClassError("cat"), "unknown_class"),
    ],
)
def test_what_a_device_cannot_use_becomes_a_code(error: Exception, code: str) -> None:
    """The message stays as it is."""
    with pytest.raises(DeclinedError) as caught, declines("bad_model", unknown="unknown_model"):
        raise error
    assert (caught.value.code, str(caught.value)) == (code, str(error))


def test_an_unknown_name_has_no_code_of_its_own_where_none_is_named() -> None:
    """A name inside a task's data is bad data."""
    with pytest.raises(DeclinedError) as caught, declines("bad_data"):
        raise NoSuchNameError("no such source")
    assert caught.value.code == "bad_data"


def test_other_errors_pass() -> None:
    """A broken disk is no reason to decline, and neither is a bug; built-in methods are not guarded at all."""
    with pytest.raises(MachineError), declines("bad_data"):
        raise MachineError("disk")
    with pytest.raises(InputError), declines_user_method("fedavg"):
        raise InputError("not the method's fault")
