"""The one table of what may import what: two packages, each a list of layers from the bottom to the top.

A theme (a folder of a package) may import the themes of the layers below its own, never one beside it, so that no
cycle can exist. The top-level modules of a package, its leaves, lie below all of its themes. `coordinator` may import
every theme of `edge_client`; `edge_client` never imports `coordinator`.

The sentence at the end of each folder's docstring and the diagrams in CONTRIBUTING.md are generated from this table:
`python tests/architecture/import_table.py` writes both.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]

# modules directly in a package, from the bottom to the top; at most 8, beside `__init__` and `__main__`
LEAVES: dict[str, tuple[str, ...]] = {
    "edge_client": ("errors", "decoding", "records", "faults", "durable", "logs", "params", "user_code"),
    "coordinator": ("run_details", "timeline", "control_messages", "control", "state", "columns", "run_check"),
}
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "edge_client": (
        ("config", "wire"),
        ("device", "data", "transport", "knowledge"),
        ("models",),
        ("task", "planning", "training"),
        ("methods",),
        ("measuring",),
        ("worker",),
        ("client",),
        ("operate",),
        ("onnx",),
        ("cli",),
    ),
    "coordinator": (
        ("store", "broker"),
        ("fleet", "rounds", "results"),
        ("aggregation", "report"),
        ("conductor",),
        ("server",),
        ("requests",),
        ("simulation", "dashboard"),
        ("cli",),
    ),
}


def themes(package: str) -> list[str]:
    """The folders of a package, from the bottom to the top."""
    return [theme for layer in LAYERS[package] for theme in layer]


def below(package: str, theme: str) -> list[str]:
    """What a theme may import of its own package, beside the leaves."""
    layers = LAYERS[package]
    number = next(number for number, layer in enumerate(layers) if theme in layer)
    return [other for layer in layers[:number] for other in layer]


def sentence(package: str, theme: str) -> str:
    """How the docstring of a folder's `__init__` ends."""
    allowed = below(package, theme)
    own = f"the leaves, {', '.join(allowed)}" if allowed else "the leaves"
    return f"May import: {own}{'; edge_client' if package == 'coordinator' else ''}."


def diagram(package: str) -> str:
    """The package as CONTRIBUTING.md draws it: a layer a line, the lowest first."""
    rows = [", ".join(LEAVES[package]), *(", ".join(layer) for layer in LAYERS[package])]
    names = ["leaves", *(str(number) for number in range(1, len(rows)))]
    width = max(len(name) for name in names)
    return "\n".join([package, *(f"  {name:>{width}}  {row}" for name, row in zip(names, rows, strict=True))])


def _write() -> None:
    for package in LAYERS:
        for theme in themes(package):
            path = ROOT / package / theme / "__init__.py"
            text = path.read_text(encoding="utf-8")
            kept = re.sub(r"\s*May import:.*?\.(?=\s*\"\"\")", "", text, flags=re.DOTALL).rstrip().removesuffix('"""')
            last = textwrap.fill(sentence(package, theme), 120)
            path.write_text(f'{kept.rstrip()}\n\n{last}\n"""\n', encoding="utf-8")
        path = ROOT / "CONTRIBUTING.md"
        text = path.read_text(encoding="utf-8")
        drawn = re.sub(rf"```\n{package}\n.*?```", f"```\n{diagram(package)}\n```", text, flags=re.DOTALL)
        path.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    _write()
