"""Labels by name: any numbering of a device becomes the run's, and what is unknown comes with its cure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_client.config.device_file import DeviceFile
from edge_client.config.tables import parse_table
from edge_client.data.labels import Labels, UnknownClassError, from_array, positions
from edge_client.errors import InputError

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # type: ignore[no-redef]

CLASSES = ("ok", "scratch", "dent")


def labels(*values: int, names: tuple[str, ...] | None = None, text: bool = False) -> Labels:
    return Labels(values=np.array(values, dtype=np.int64), names=names, text=text)


def test_two_devices_that_number_their_classes_differently_agree() -> None:
    """`dent` is 0 in a set of dent and ok, 1 in a set of ok... and dent; the run has it at 2."""
    one = positions(labels(0, 1, 0, names=("dent", "ok")), CLASSES, {}, "a")
    other = positions(labels(1, 0, 1, names=("ok", "dent")), CLASSES, {}, "b")
    assert one.tolist() == other.tolist() == [2, 0, 2]


def test_names_are_renamed_first() -> None:
    """Two names of a device may be one class of the run."""
    mine = labels(0, 1, 2, names=("kratzer", "schramme", "ok"))
    rename = {"kratzer": "scratch", "schramme": "scratch"}
    assert positions(mine, CLASSES, rename, "a").tolist() == [1, 1, 0]


def test_an_unknown_class_is_proposed_one_that_the_device_lacks() -> None:
    """`odd` is nearer to `ok` and `dent`, which are there already."""
    with pytest.raises(UnknownClassError, match=r'rename = \{ odd = "scratch" \}'):
        positions(labels(0, 1, 2, names=("odd", "ok", "dent")), CLASSES, {}, "/data/train")


def test_an_unknown_class_comes_with_the_line_that_mends_it() -> None:
    """The line is TOML that the parser takes, keeps what was renamed before, and then the labels map."""
    mine = labels(0, 1, 2, 3, names=("Kratzer links", "scrach", "ok", "beule"))
    with pytest.raises(UnknownClassError) as caught:
        positions(mine, CLASSES, {"beule": "dent"}, "/data/train")
    text = str(caught.value)
    assert text.startswith("/data/train: classes 'Kratzer links', 'scrach' not in the run, which has ok, scratch, dent")
    line = text[text.index("rename = ") :]
    assert line == 'rename = { beule = "dent", "Kratzer links" = "scratch", scrach = "scratch" }'
    mended = parse_table(DeviceFile, tomllib.loads(line), source="test").rename
    assert positions(mine, CLASSES, mended, "/data/train").tolist() == [1, 1, 0, 2]


def test_a_rename_to_nothing_says_so() -> None:
    """The target is misspelt, not the folder."""
    with pytest.raises(UnknownClassError, match=r"class 'kratzer' \(renamed to 'scrach'\) .*kratzer = \"scratch\""):
        positions(labels(0, names=("kratzer",)), CLASSES, {"kratzer": "scrach"}, "a")


def test_a_class_that_the_device_lacks_or_has_no_samples_of_is_fine() -> None:
    """Only `ok` occurs; `rust` is named but empty, the run's others are missing."""
    assert positions(labels(0, 0, names=("ok", "rust")), CLASSES, {}, "a").tolist() == [0, 0]


def test_integers_without_names_are_positions() -> None:
    """Range-checked, with the sample named."""
    assert positions(labels(2, 0), CLASSES, {"0": "dent"}, "a").tolist() == [2, 0]
    with pytest.raises(InputError, match=r"from 0 to 2 \(the run's classes\), got 3 at sample 1"):
        positions(labels(0, 3), CLASSES, {}, "a")


@pytest.mark.parametrize(
    ("classes", "expected"), [(("no", "yes", "maybe"), [2, 1]), (("1", "2", "3"), [1, 0]), (("2", "yes", "1"), [0, 2])]
)
def test_numbers_in_text_are_names_if_the_run_has_a_class_that_is_a_number(
    classes: tuple[str, ...], expected: list[int]
) -> None:
    """Decided by the run alone: a device that happens to lack a class must not decide otherwise than the next one."""
    mine = labels(0, 1, names=("2", "1"), text=True)
    assert positions(mine, classes, {}, "a").tolist() == expected


def test_folders_named_by_numbers_are_names() -> None:
    """They are no text from a table: `0` is unknown where the run has words."""
    with pytest.raises(UnknownClassError):
        positions(labels(0, names=("0",)), CLASSES, {}, "a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([0.0, np.nan]), "expected integer labels or class names, got float64"),
        (np.array([[0], [1]]), "expected one label per sample, got shape"),
        (np.array([0, 2]), "from 0 to 1 .its own classes., got 2 at sample 1"),
    ],
)
def test_other_labels_are_refused(values: Any, message: str) -> None:
    """With its own class names a set is checked against them."""
    with pytest.raises(InputError, match=message):
        from_array(values, "a", ["ok", "dent"])
