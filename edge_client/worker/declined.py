"""How a worker declines an assignment: one error with a short code, and what turns other errors into it.

Does not cover: how the process ends then (`process`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from edge_client.data.labels import UnknownClassError
from edge_client.errors import FedfitError, InputError, NoSuchNameError, NothingFitsError
from edge_client.methods import user_methods
from edge_client.models.found_units.result import UnitsDifferError
from edge_client.models.library import LibraryMissingError

__all__ = ["DeclinedError", "declines", "declines_user_method"]


class DeclinedError(FedfitError):
    """This device will not do the assignment; `code` is short and stable, the message is for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@contextmanager
def declines(code: str, *, unknown: str | None = None) -> Iterator[None]:
    """Decline with `code` where an `InputError` comes out of the body, with `unknown` where it is an unknown name."""
    try:
        yield
    except UnknownClassError as error:
        raise DeclinedError("unknown_class", str(error)) from error
    except NoSuchNameError as error:
        raise DeclinedError(unknown or code, str(error)) from error
    except LibraryMissingError as error:
        raise DeclinedError("library_missing", str(error)) from error
    except UnitsDifferError as error:
        raise DeclinedError("units_differ", str(error)) from error
    except NothingFitsError as error:
        raise DeclinedError("nothing_fits", str(error)) from error
    except InputError as error:
        raise DeclinedError(code, str(error)) from error


@contextmanager
def declines_user_method(method: str) -> Iterator[None]:
    """Decline where the user's own method, which a simulation tries, fails anywhere; the reason names its file."""
    guard = user_methods.guard(method, "on a device")
    if isinstance(guard, nullcontext):
        yield
    else:
        with declines("bad_method", unknown="unknown_method"), guard:
            yield
