"""`edge-client prove` with 200 cases: nothing may be above its prediction or its budget, and predictions are close.

The excess is (predicted - measured) / measured training memory, of cases of 16 MB and more; of smaller ones in bytes.
"""

from __future__ import annotations

import argparse

from benchmarks.figures import Figure
from edge_client.cli import prove_command

__all__ = ["measure"]

_CASES, _QUICK_CASES = 200, 20


def measure(*, quick: bool) -> list[Figure]:
    """Cases that broke the promise, and excess before and after the rehearsal."""
    count = _QUICK_CASES if quick else _CASES
    options = argparse.Namespace(task=None, input=None, count=count, minutes=None, seed=1, out=None)
    proof = prove_command.run(options)
    print(prove_command.describe(proof))
    summary = prove_command.to_json(proof)["summary"]
    large, small, search = (summary[name] for name in ("excess", "excess_bytes_below_16_mb", "excess_of_search"))
    return [
        Figure(name="cases above", unit="cases", values=(float(len(proof.above)),), at_most=0),
        Figure(name="architectures", unit="models", values=(float(summary["architectures"]),)),
        Figure(name="mean excess, 16 MB and more", unit="%", values=(100 * large["mean"],), at_most=6),
        Figure(name="90th percentile of the excess", unit="%", values=(100 * large["p90"],), at_most=12),
        Figure(name="mean excess, smaller cases", unit="MB", values=(small["mean"] / 1e6,), at_most=2),
        Figure(name="mean excess of the search", unit="%", values=(100 * search["mean"],), at_most=25),
    ]
