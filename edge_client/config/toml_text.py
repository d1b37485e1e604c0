"""Values as text in TOML: what `coordinator new` writes, and reports show of a run file."""

from __future__ import annotations

import json
from collections.abc import Mapping

from edge_client.records import is_id

__all__ = ["toml_value"]


def toml_value(value: object) -> str:
    """A value in TOML, whose strings are those of JSON but for DEL."""
    if isinstance(value, Mapping):
        items = [f"{key if is_id(key) else toml_value(key)} = {toml_value(item)}" for key, item in value.items()]
        return f"{{ {', '.join(items)} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
