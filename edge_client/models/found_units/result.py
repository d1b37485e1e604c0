"""What a search found: where a module is cut, and whose tensors each unit has. It travels with a run. Free of torch.

Two machines that build the same module record the same calls: their hash, and that of the names and shapes of all
tensors, tell whether units that one of them found are those of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from edge_client.errors import InputError, PayloadError
from edge_client.records import Between, Matches

__all__ = ["MAX_UNITS", "FoundUnits", "UnitsDifferError"]

MAX_UNITS = 48
_MAX_CALLS = 2**20

_Hash = Annotated[str, Matches(r"([0-9a-f]{64})?")]
_Name = Annotated[str, Matches(r"[!-~]{1,240}")]


class UnitsDifferError(InputError):
    """The module of this machine is cut otherwise than that of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundUnits:
    """Units in order; a module that cannot be cut has one, and the reason."""

    names: tuple[_Name, ...]
    cuts: tuple[Annotated[int, Between(0, _MAX_CALLS)], ...] = ()  # calls at whose ends the units end, but the last
    # the unit of each tensor, in the order of the module's state: runs of (unit, number of tensors)
    spans: tuple[tuple[Annotated[int, Between(0, _MAX_CALLS)], ...], ...] = ()
    needs_input: bool = False  # each unit is given the module's input, too: masks and positions are made from it
    calls: _Hash = ""  # of the recorded calls
    module: _Hash = ""  # of the names and shapes of all tensors
    versions: str = ""  # of the libraries with which they were found
    reason: str = ""  # why there is one unit only

    @property
    def is_cut(self) -> bool:
        """Whether there is more than one unit."""
        return bool(self.cuts)

    def tensors(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """The tensors of each unit; `names` are all that travel, in the order of the module's state.

        Raises `PayloadError` unless every one of them has its unit.
        """
        if not self.is_cut:
            return {self.names[0]: tuple(names)}
        of_unit: dict[str, list[str]] = {name: [] for name in self.names}
        rest = iter(names)
        for span in self.spans:
            if len(span) != 2 or span[0] >= len(self.names):
                raise PayloadError("malformed", f"units: expected (unit, tensors) of {len(self.names)}, got {span}")
            of_unit[self.names[span[0]]].extend(itertools.islice(rest, span[1]))
        if sum(map(len, of_unit.values())) != len(names) or sum(span[1] for span in self.spans) != len(names):
            raise PayloadError("malformed", f"units: expected a unit for each of {len(names)} tensors")
        return {name: tuple(tensors) for name, tensors in of_unit.items()}
