"""Any record of a class, as its annotations allow it: strategies for property tests."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Union

from hypothesis import strategies as st

from edge_client.records import Between, Matches


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Everything that an annotation allows, bounded so that it fits a frame."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        base, *limits = typing.get_args(annotation)
        for limit in limits:
            if isinstance(limit, Matches):
                pattern = limit.pattern.replace(".{0,2000}", ".{0,200}")
                return st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="utf-8"))
            if isinstance(limit, Between):
                if base is int:
                    return st.integers(int(limit.low), int(limit.high))
                return st.floats(limit.low, limit.high)
        return values(base)
    if origin in (Union, types.UnionType):
        return st.one_of(*(st.none() if a is type(None) else values(a) for a in typing.get_args(annotation)))
    if origin is tuple:
        items = typing.get_args(annotation)
        if items[-1] is Ellipsis:
            return st.lists(values(items[0]), max_size=4).map(tuple)
        return st.tuples(*(values(item) for item in items))
    if origin in (dict, Mapping):
        return st.dictionaries(st.text(max_size=8), values(typing.get_args(annotation)[1]), max_size=4)
    if dataclasses.is_dataclass(annotation):
        return records(typing.cast(type, annotation))
    if annotation is float:
        return st.floats(-1e299, 1e299, allow_nan=False)
    if annotation is Any:
        return st.one_of(st.none(), st.booleans(), st.integers(0, 9), st.text(max_size=3))
    return {int: st.integers(-(2**63), 2**64 - 1), bool: st.booleans(), str: st.text(max_size=50)}[annotation]


def records(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{f.name: values(hints[f.name]) for f in dataclasses.fields(typing.cast(Any, cls))})
