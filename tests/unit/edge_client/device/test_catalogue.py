"""Device models that ship with fedfit, and what is said about a file that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edge_client.device import catalogue
from edge_client.device.catalogue import known_names, load_known
from edge_client.device.report import report_known_model
from edge_client.errors import InputError, NoSuchNameError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[4]
FILES = sorted((ROOT / "profiles").glob("*.toml"))
GOOD = """\
name = "A board"
kind = "host"
memory = "4GB"
reserve = "500MB"
cores = 4

[sources]
memory = "its box"
reserve = "a guess"
cores = "its box"
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_profile_is_valid_and_makes_sense(path: Path) -> None:
    """Named after its kind; the budget is 80 % of (memory - reserve - max(128 MB, memory / 10))."""
    device = load_known(path.stem)
    assert path.stem.startswith(device.kind)
    memory, reserve = device.memory, device.reserve
    expected = (memory - reserve - max(128_000_000, memory // 10)) * 4 // 5
    assert report_known_model(path.stem, None).budget_bytes == expected > 0


def test_the_models_of_the_recorded_systems_are_known() -> None:
    """And every file is found under its name."""
    assert known_names() == [path.stem for path in FILES]
    wanted = ["jetson-orin-nano-8gb", "jetson-agx-orin-64gb", "jetson-xavier-nx-8gb", "jetson-thor-128gb"]
    wanted += ["raspberry-pi-zero-2-w", "raspberry-pi-4-4gb", "raspberry-pi-5-8gb"]
    assert set(wanted) <= set(known_names())


def test_profiles_are_part_of_the_package() -> None:
    """setuptools takes what its patterns match below edge_client, links included."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["edge_client"]
    packed = {file.name for pattern in patterns for file in (ROOT / "edge_client").glob(pattern)}
    assert {path.name for path in FILES} <= packed
    assert catalogue._FOLDER == ROOT / "edge_client/_profiles"


def test_the_page_lists_every_profile() -> None:
    """With memory, usual reserve, cores and bandwidth as in its file."""
    page = (ROOT / "docs/explanation/devices.md").read_text(encoding="utf-8")
    for path in FILES:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        cells = [f"`{path.stem}`", table["name"], table["memory"], table["reserve"], str(table["cores"])]
        row = f"| {' | '.join(cells)} | {table.get('bandwidth', '')} |".replace("  |", " |")
        assert row in page, f"docs/explanation/devices.md lacks:\n{row}"


def test_an_unknown_name_lists_the_known_ones() -> None:
    """Exit 7; a name is no path."""
    with pytest.raises(NoSuchNameError, match=r"unknown profile 'jetson'; known: .*jetson-orin-nano-8gb.*zero-2-w"):
        load_known("jetson")
    assert NoSuchNameError.exit_code == 7


def test_a_file_of_ones_own_is_a_profile(tmp_path: Path) -> None:
    """0.8 * (4 GB - 0.5 GB - 0.4 GB)."""
    (tmp_path / "board.toml").write_text(GOOD)
    report = report_known_model(str(tmp_path / "board.toml"), None)
    assert (report.budget_bytes, report.model, report.gpu_memory) == (2_480_000_000, "A board", "none")
    assert report_known_model(str(tmp_path / "board.toml"), 10**9).budget_bytes == 10**9


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        ('memory = "4GB"', 'memry = "4GB"', "board.toml, line 3: unknown key 'memry'; did you mean 'memory'?"),
        ('memory = "4GB"', 'memory = "4 apples"', "line 3: memory: expected a size such as 512MB"),
        ('memory = "4GB"', "memory = -1", "line 3: memory: expected 0 to 9007199254740992, got -1 (MemTotal"),
        ('kind = "host"', 'kind = "phone"', "line 2: kind: 'phone' does not match jetson|raspberry-pi|gpu-host"),
        ("cores = 4", "cores = 0", "line 5: cores: expected 1 to "),
        ("cores = 4", "cores = true", "line 5: cores: expected int, got bool"),
        ("cores = 4\n", "", "board.toml: cores is missing (CPU cores)"),
        ('reserve = "500MB"', 'reserve = "4GB"', "line 4: reserve: expected less than memory (4000000000)"),
        ("cores = 4", "cores = 4\ngpu-memory = 'unified'", "line 6: gpu-memory: expected none exactly without an acc"),
        ("cores = 4", "cores = 4\nbandwidth = 10", "line 8: sources: expected a source for bandwidth, got none"),
        ('cores = "its box"', 'cores = "its box"\nspeed = "x"', "line 11: sources.speed: expected one of the figures"),
        ('cores = "its box"', 'cores = "its\\u001bbox"', "line 10: sources.cores: "),
        ("[sources]", "[sources", "is not valid TOML: Expected ']'"),
    ],
)
def test_a_wrong_field_is_named_with_its_line_and_what_is_allowed(
    tmp_path: Path, good: str, bad: str, told: str
) -> None:
    """Lines are those of `GOOD` with the change."""
    assert good in GOOD
    (tmp_path / "board.toml").write_text(GOOD.replace(good, bad))
    with pytest.raises(InputError) as caught:
        load_known(str(tmp_path / "board.toml"))
    assert told in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, and not even text."""
    with pytest.raises(InputError, match=r"cannot read .*none\.toml: No such file"):
        load_known(str(tmp_path / "none.toml"))
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"b\.toml is not valid TOML"):
        load_known(str(tmp_path / "b.toml"))
