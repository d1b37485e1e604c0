"""The exceptions of fedfit and the exit code that each ends a command with.

    FedfitError                 1   a bug, or something nobody foresaw
    ├── InputError              3   a file or a value that a person wrote
    ├── MachineError            4   this machine: port, rights, disk, state directory
    │   └── DiskFullError       4   no space left; passes alone when there is space again
    ├── NetworkError            5   the broker is not there, or does not let us in
    ├── NothingFitsError        6   no plan fits the memory budget
    ├── NoSuchNameError         7   a run, device, model or method nobody has
    ├── ConflictError           8   it exists already, or somebody else holds it
    ├── RunFailedError          9   the run ended without a model, or a device did not take a deployed one
    └── PayloadError            -   the peer sent bytes that break the rules; never ends a process

`PayloadError` means "the peer lied"; a `ValueError` or `TypeError` from this package means "you misused me".
Messages say what was expected, what came, from where, and what to do.
"""

from __future__ import annotations

__all__ = [
    "ConflictError",
    "DiskFullError",
    "FedfitError",
    "InputError",
    "MachineError",
    "NetworkError",
    "NoSuchNameError",
    "NothingFitsError",
    "PayloadError",
    "RunFailedError",
    "is_out_of_memory",
]

_OUT_OF_MEMORY = (
    "ALLOC_FAILED",  # CUBLAS_STATUS_..., CUDNN_STATUS_...
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # a Jetson's GPU: torch asks for the numbers of its message in vain
    "can't allocate memory",
    "not enough memory",
    "could not create a memory",
    "could not create a primitive",
    "out of memory",
)


class FedfitError(Exception):
    """Root of everything that fedfit raises on purpose."""

    exit_code = 1


class InputError(FedfitError):
    """A file or a value that a person wrote is not usable."""

    exit_code = 3


class MachineError(FedfitError):
    """A problem of this machine: a busy port, missing rights, the state directory of another program."""

    exit_code = 4


class DiskFullError(MachineError):
    """No space left on the device; what was being written is gone, what was written before is not."""


class NetworkError(FedfitError):
    """The broker is unreachable, or refuses the credentials."""

    exit_code = 5


class NothingFitsError(FedfitError):
    """No plan fits the budget; the message names the smallest budget that would do, `least_bytes` where it is known."""

    exit_code = 6

    def __init__(self, message: str, *, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class NoSuchNameError(FedfitError):
    """The name of an unknown run, device, model or method; the message lists the known ones."""

    exit_code = 7

    @classmethod
    def of(cls, kind: str, name: str, known: list[str]) -> NoSuchNameError:
        """The usual error: it names what was asked for and lists what exists."""
        return cls(f"unknown {kind} {name!r}; known: {', '.join(sorted(known)) or 'none yet'}")


class ConflictError(FedfitError):
    """Something exists already, or another process holds it."""

    exit_code = 8


class RunFailedError(FedfitError):
    """The run ended without a model, or a device did not take a deployed one."""

    exit_code = 9


class PayloadError(FedfitError):
    """Bytes or fields from a peer that break the rules; `code` is short, stable and safe to send back."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed."""
    is_torch_error = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    return is_torch_error or isinstance(error, MemoryError)
