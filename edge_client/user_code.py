"""A guard around users' code: a task, or a method that a simulation tries."""

from __future__ import annotations

import types
from typing import Final

from edge_client.errors import FedfitError, InputError, is_out_of_memory

__all__ = ["UserCode"]

_MAX_SHOWN: Final = 300


class UserCode:
    """Turns any exception of a user's code into a one-line `InputError` that names the line of the code.

    A user's mistake must end neither a device nor the server, whatever its type. Errors of fedfit, which the code may
    cause by calling it, pass unchanged, and so does running out of memory.
    """

    def __init__(self, path: str, doing: str, *, user_lines_only: bool = False) -> None:
        """`user_lines_only`: around code of ours that calls the user's now and then; an error that never passed
        through the user's file is ours."""
        self._path = path
        self._doing = doing
        self._user_lines_only = user_lines_only

    def __enter__(self) -> UserCode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if not isinstance(error, (Exception, SystemExit)) or isinstance(error, FedfitError):
            return
        if is_out_of_memory(error):
            return
        where, message = self._line(trace), str(error)
        if self._user_lines_only and not where:
            return
        if isinstance(error, SyntaxError):
            where, message = f"line {error.lineno}" if error.lineno else "", error.msg
        shown = " ".join(message.split())[:_MAX_SHOWN]
        raise InputError(
            f"{self._path}{f', {where}' if where else ''}: {self._doing}: {type(error).__name__}{shown and ': '}{shown}"
        ) from error

    def _line(self, trace: types.TracebackType | None) -> str:
        """The innermost line of the user's file; errors often come from a library below it."""
        line = ""
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._path:
                line = f"line {trace.tb_lineno}"
            trace = trace.tb_next
        return line
