"""Any numbering and naming of classes, any table, any bytes: the same labels, the same numbers, or an input error."""

from __future__ import annotations

import contextlib
import csv as plain_csv
import io
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.config.device_file import DataSection
from edge_client.data.labels import Labels, positions
from edge_client.data.sets import csv
from edge_client.data.sources import open_data
from edge_client.errors import InputError

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=8)
NAMES = st.lists(WORDS, min_size=2, max_size=6, unique=True)
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)


@given(NAMES, st.data())
def test_the_order_of_a_devices_own_classes_does_not_matter(classes: list[str], data: st.DataObject) -> None:
    """Each sample's class is the one of its name, however the device numbers and calls it."""
    own = data.draw(st.permutations(classes))
    truth = data.draw(st.lists(st.sampled_from(classes), max_size=10))
    local = {name: f"{name}-here" for name in classes if f"{name}-here" not in classes}
    names = tuple(local.get(name, name) for name in own)
    values = np.array([own.index(name) for name in truth], dtype=np.int64)
    rename = {here: name for name, here in local.items()}
    mapped = positions(Labels(values=values, names=names), classes, rename, "test")
    assert [classes[number] for number in mapped] == truth


@settings(max_examples=50)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.sampled_from(["ok", 'a "dent"', "x,y"])), min_size=1, max_size=8))
def test_a_table_that_pythons_writer_wrote_is_read_back(rows: list[tuple[float, float, str]]) -> None:
    """Quotes and commas in labels; every number is that of float()."""
    stream = io.StringIO()
    writer = plain_csv.writer(stream)
    writer.writerows([("a", "b", "label"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_text(stream.getvalue(), encoding="utf-8", newline="")
        section = DataSection(source="csv", train=str(path), test_fraction=0.0)
        x, y = open_data(section, ["ok", 'a "dent"', "x,y"], (2,))[0].batch(range(len(rows)))
    assert np.array_equal(x.numpy(), np.array([row[:2] for row in rows], dtype=np.float32))
    assert [["ok", 'a "dent"', "x,y"][number] for number in y] == [row[2] for row in rows]


@settings(max_examples=150)
@given(st.one_of(st.binary(max_size=80), st.text('ab,"\r\n01.-;\ufeff', max_size=80).map(str.encode)))
def test_any_bytes_are_a_table_or_an_input_error(data: bytes) -> None:
    """Whatever lies where a CSV file should."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_bytes(data)
        with contextlib.suppress(InputError):
            table = csv(path)
            rows, convert = table.rows(np.arange(len(table.labels.values)), (table.num_columns,))  # type: ignore[attr-defined]
            assert np.isfinite(convert(rows.take(np.arange(len(table.labels.values))))).all()
