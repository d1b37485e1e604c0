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
    "is_out_of_accelerator_memory",
    "is_out_of_memory",
    "torch_failure",
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

# of NVIDIA's builds for ARM servers, which need them and do not say so
_LIBRARIES = (
    ("libnvpl", "pip install nvpl-lapack nvpl-blas"),
    ("libcudss", "pip install nvidia-cudss-cu13"),
    ("libcudnn", "install cuDNN of the CUDA that this torch was built for"),
)
_OUT_OF_ACCELERATOR = (
    "ALLOC_FAILED",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUDA out of memory",
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


def torch_failure(error: BaseException) -> MachineError | None:
    """The error to show where torch itself does not load, with what mends it; None for any other error."""
    if not isinstance(error, (ImportError, OSError)) or isinstance(error, FedfitError):
        return None
    name = getattr(error, "name", None) or ""
    frame, inside = error.__traceback__, name.partition(".")[0] == "torch"
    while frame is not None and not inside:
        inside = "/torch/" in frame.tb_frame.f_code.co_filename
        frame = frame.tb_next
    if not inside:
        return None
    text = " ".join(str(error).split())[:300]
    if isinstance(error, ModuleNotFoundError) and name == "torch":
        return MachineError("torch is not installed: pip install torch (on a Jetson: deploy/jetson/README.md)")
    remedy = next((remedy for library, remedy in _LIBRARIES if library in text), "install it again: pip install torch")
    return MachineError(f"torch does not load: {text}; {remedy} (on a Jetson: deploy/jetson/README.md)")


def is_out_of_accelerator_memory(error: BaseException) -> bool:
    """Whether an accelerator refused memory, and not the host."""
    is_text = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_ACCELERATOR)
    # torch's class is a RuntimeError, and of the same name in all versions; nobody here loads torch for it
    return is_text or (isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed."""
    is_torch_error = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    return is_torch_error or is_out_of_accelerator_memory(error) or isinstance(error, MemoryError)
