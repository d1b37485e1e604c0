"""Runs checks of a machine and reports each as passed, or as a problem with the command that solves it.

A check is a function that returns a description of what it saw, or raises `ProblemError` (with the remedy) or
`SkippedError` (if there is nothing to check). Does not cover: the checks themselves (`device_checks`, and the
coordinator's own), running them as a service (`sandbox`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from edge_client.client.status import one_line
from edge_client.errors import FedfitError, InputError, NoSuchNameError, PayloadError
from edge_client.records import Matches, Text, from_map, to_map

__all__ = [
    "Checks",
    "Finding",
    "ProblemError",
    "SkippedError",
    "describe",
    "examine",
    "failed",
    "from_json",
    "to_json",
    "verdict",
]

Checks: TypeAlias = Mapping[str, Callable[[], str]]  # by name, in the order in which a person would look


class ProblemError(FedfitError):
    """A check found a problem; `mend` is the command that solves it, or what else a person has to do."""

    def __init__(self, problem: str, mend: str) -> None:
        super().__init__(problem)
        self.mend = mend


class SkippedError(FedfitError):
    """There is nothing to check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check."""

    check: Text
    state: Annotated[str, Matches(r"passed|failed|skipped")]
    text: Annotated[str, Matches(r"(?s).{0,4000}")]
    mend: Annotated[str, Matches(r"(?s).{0,2000}")] = ""
    directive: Text = ""  # of the unit, if that is what is in the way


def examine(checks: Checks, only: Sequence[str] = ()) -> list[Finding]:
    """Run all checks, or only those named; raises `NoSuchNameError`."""
    for name in only:
        if name not in checks:
            raise NoSuchNameError.of("check", name, list(checks))
    return [_look(name, look) for name, look in checks.items() if not only or name in only]


def _look(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(check=name, state="passed", text=look())
    except SkippedError as reason:
        return Finding(check=name, state="skipped", text=str(reason)[:4000])
    except ProblemError as problem:
        return Finding(check=name, state="failed", text=str(problem)[:4000], mend=problem.mend[:2000])
    except FedfitError as error:  # it says itself what to do
        return Finding(check=name, state="failed", text=str(error)[:4000])


def failed(findings: Sequence[Finding]) -> list[Finding]:
    """The failed checks."""
    return [finding for finding in findings if finding.state == "failed"]


def describe(findings: Sequence[Finding]) -> str:
    """Format findings for people: one line each, with the remedy below."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<7}  {finding.check:<{width}}  {one_line(finding.text)}")
        indent = " " * (7 + 2 + width + 2)
        if finding.directive:
            lines.append(f"{indent}blocked by: {one_line(finding.directive)}")
        if finding.mend:
            lines.append(f"{indent}mend it: {one_line(finding.mend)}")
    return "\n".join(lines)


def verdict(findings: Sequence[Finding]) -> FedfitError | None:
    """The error with which the command ends if a check failed; its exit code is 1."""
    bad = failed(findings)
    if not bad:
        return None
    return FedfitError(f"{len(bad)} of {len(findings)} checks failed: {', '.join(finding.check for finding in bad)}")


def to_json(findings: Sequence[Finding]) -> str:
    """A stable form: `ok`, and `checks` in order."""
    return json.dumps({"ok": not failed(findings), "checks": [to_map(finding) for finding in findings]}, indent=1)


def from_json(text: str) -> list[Finding]:
    """Read the report of another process; raises `InputError` for anything else."""
    try:
        return [from_map(Finding, entry) for entry in json.loads(text)["checks"]]
    except (ValueError, KeyError, TypeError, PayloadError, RecursionError) as error:
        raise InputError(f"expected the report of a doctor, got {text[:200]!r} ({error})") from error
