"""What an installed fedfit brings beside code: everything below `profiles/` and `deploy/`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edge_client.device import catalogue
from edge_client.operate import service_unit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def shipped() -> set[str]:
    """What the patterns of pyproject.toml match; links are followed, as setuptools does."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = table["tool"]["setuptools"]["package-data"]["edge_client"]
    package = ROOT / "edge_client"
    return {str(path.relative_to(package)) for pattern in patterns for path in package.glob(pattern) if path.is_file()}


@pytest.mark.parametrize("folder", ["profiles", "deploy"])
def test_every_file_ships(folder: str) -> None:
    """A deeper folder or another suffix needs a pattern of its own."""
    inside = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert inside
    assert {f"_{name}" for name in inside} <= shipped()


def test_links_lead_to_the_folders_of_the_repository() -> None:
    """One copy of each file."""
    for name in ("profiles", "deploy"):
        assert os.readlink(ROOT / f"edge_client/_{name}") == f"../{name}"


def test_what_ships_is_found_through_the_package() -> None:
    """As an installed command does."""
    assert "jetson-orin-nano-8gb" in catalogue.known_names()
    assert "[Service]" in service_unit.template("fedfit-coordinator").text
    assert "data/digits.npz" in shipped()
