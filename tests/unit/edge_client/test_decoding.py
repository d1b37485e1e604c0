"""The compiled decoder: what it takes, and that it leaves reasons to the slow one."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from edge_client.decoding import Between, Matches, MismatchError, decoder
from edge_client.errors import PayloadError
from edge_client.records import from_map


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    number: Annotated[int, Between(0, 9)]
    share: Annotated[float, Between(0, 1)] = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    name: Annotated[str, Matches(r"[a-z]{1,3}")]
    leaves: tuple[_Leaf, ...] = ()
    pair: tuple[int, bool] = (0, False)
    sizes: Mapping[str, Annotated[int, Between(1, 5)]] = dataclasses.field(default_factory=dict)
    parent: _Tree | None = None
    extra: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Even:
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError("odd")


def test_every_kind_of_field_is_made() -> None:
    """Nested records, in themselves too; lists become tuples; an int stands for a float."""
    data = {
        "name": "oak",
        "leaves": [{"number": 3, "share": 1}, {"number": 4}],
        "pair": [7, True],
        "sizes": {"a": 5},
        "parent": {"name": "elm"},
        "extra": [1, {"b": None}],
        "x-later": "ignored",
    }
    tree = decoder(_Tree)(data)
    assert tree == _Tree(
        name="oak",
        leaves=(_Leaf(number=3, share=1.0), _Leaf(number=4)),
        pair=(7, True),
        sizes={"a": 5},
        parent=_Tree(name="elm"),
        extra=[1, {"b": None}],
    )
    assert type(tree.leaves[0].share) is float


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Oak"},
        {"name": "oak\n"},
        {"name": 3},
        {"leaves": {"number": 1}},
        {"leaves": [{"number": 10}]},
        {"leaves": [{"number": True}]},
        {"leaves": [{"number": 1, "share": 1.5}]},
        {"leaves": [{"number": 1, "share": float("nan")}]},
        {"pair": [7]},
        {"pair": [7, 1]},
        {"sizes": {"a": 6}},
        {"sizes": {1: 1}},
        {"parent": {"name": "oak", "unknown": 1}},
        {"unknown": 1},
    ],
)
def test_what_does_not_match_is_refused_by_both(change: dict[str, Any]) -> None:
    """The compiled decoder without a word, `from_map` with the place of the first wrong value."""
    data = {"name": "oak"} | change
    with pytest.raises(MismatchError):
        decoder(_Tree)(data)
    with pytest.raises(PayloadError, match=r"^\w+: w\b"):
        from_map(_Tree, data, where="w")


def test_a_missing_field_is_named_by_the_slow_decoder() -> None:
    """Python's own error of the constructor never gets out."""
    with pytest.raises(PayloadError, match="w: missing name"):
        from_map(_Tree, {}, where="w")


def test_a_map_that_is_no_dict_is_taken() -> None:
    """The compiled decoder leaves it to the slow one."""
    assert from_map(_Leaf, types.MappingProxyType({"number": 1})) == _Leaf(number=1)


def test_the_error_of_a_class_itself_gets_out() -> None:
    """A `ValueError` of `__post_init__` is no mistake in the map's form."""
    assert from_map(_Even, {"number": 2}) == _Even(number=2)
    with pytest.raises(ValueError, match="odd"):
        from_map(_Even, {"number": 3})
