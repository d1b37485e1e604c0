"""How a process that measures or tests tells by its exit code how it ended; every `FedfitError` has a code of its own.

See also `edge_client.errors`, `edge_client.measuring.subprocess_call`.
"""

from __future__ import annotations

__all__ = ["NO_RUNTIME", "OVER_BUDGET", "RESULT_UNWRITTEN"]

NO_RUNTIME = 69  # EX_UNAVAILABLE: onnxruntime is missing
RESULT_UNWRITTEN = 74  # EX_IOERR: the disk did not take the result
OVER_BUDGET = 75
