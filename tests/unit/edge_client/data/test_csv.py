"""CSV files: rows read when they are wanted, every line checked when the file is opened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edge_client.config.device_file import DataSection
from edge_client.data.sets import csv
from edge_client.data.sources import open_data
from edge_client.errors import InputError

CLASSES = ("ok", "dent")
GOOD = "a,label,b\n1,ok,2.5\n-3e2,dent,4\n\n0,ok,1\n"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "d.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        GOOD.rstrip("\n"),
        "a,b,kind\n1,2.5,ok\n-3e2,4,dent\n0,1,ok\n",
        'a,label,b\n1,"ok","2.5"\n"-300", dent ,4\n0,ok,1\n',
    ],
    ids=["label", "crlf", "bom", "no end", "last column", "quotes"],
)
def test_rows_are_the_numbers_of_the_file(tmp_path: Path, text: str) -> None:
    """Three rows of two numbers, in any order; the labels by name."""
    section = DataSection(source="csv", train=str(write(tmp_path, text)), test_fraction=0.0)
    train, test = open_data(section, CLASSES, (2,))
    assert (len(train), len(test)) == (3, 0)
    x, y = train.batch([2, 1, 0, 1])
    assert torch.equal(x, torch.tensor([[0.0, 1.0], [-300.0, 4.0], [1.0, 2.5], [-300.0, 4.0]]))
    assert y.tolist() == [0, 1, 0, 1]


def test_columns_take_the_shape_of_the_model(tmp_path: Path) -> None:
    """Four columns as [1, 2, 2], in the order of the file; labels are positions."""
    path = write(tmp_path, "p0,p1,p2,p3,y\n1,2,3,4,1\n5,6,7,8,0\n")
    train, _ = open_data(DataSection(source="csv", train=str(path), test_fraction=0.0), CLASSES, (1, 2, 2))
    x, y = train.batch([0])
    assert x.tolist() == [[[[1.0, 2.0], [3.0, 4.0]]]]
    assert y.tolist() == [1]
    with pytest.raises(InputError, match=r"input \[3\] needs 3 columns of numbers, the file has 4"):
        open_data(DataSection(source="csv", train=str(path)), CLASSES, (3,))


def test_what_is_held_is_three_numbers_per_row(tmp_path: Path) -> None:
    """1,000 rows of 100 columns: 24 bytes each of the set and 16 of the part, not the 400 KB that the file has."""
    rows = "\n".join(",".join(["1.25"] * 100) + ",ok" for _ in range(1000))
    path = write(tmp_path, ",".join(f"c{i}" for i in range(100)) + ",label\n" + rows)
    train, _ = open_data(DataSection(source="csv", train=str(path), test_fraction=0.0), CLASSES, (100,))
    assert train.held_bytes == 1000 * (24 + 16)
    assert train.batch(range(1000))[0].sum().item() == 125_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected a header .*got 'nothing'"),
        ("a\n1\n", "line 1: expected a header with at least two columns separated by commas, got 'a'"),
        ("a;b;label\n1;2;ok\n", "line 1: expected a header"),
        ("1,2,3\n4,5,6\n", "line 1: expected the columns' names, got numbers; add a header line"),
        ("a,label\n1,ok\n\n2\n", "line 4: expected 2 columns as in the header, got 1"),
        ("label,a,Label\nok,1,ok\n", "line 1: expected one column 'label', got 2"),
        ("a,label\n1,ok,3\n", "line 2: expected 2 columns as in the header, got 3"),
        ("a,label\n1,ok\nx1,ok\n", "line 3: expected a finite number, got 'x1'"),
        ("a,label\nnan,ok\n", "line 2: expected a finite number, got 'nan'"),
        ("a,label\n1e999,ok\n", "line 2: expected a finite number, got '1e999'"),
        ("a,label\n1e39,ok\n", "line 2: expected a finite number, got '1e39'"),
        ("a,label\n,ok\n", "line 2: expected a finite number, got ''"),
        ("a,label\n1,\n", "line 2: expected a label, got ''"),
        ('a,label\n1,"ok\n', "line 2: cannot be read as CSV"),
        (b"a,label\n1,\xff\n", "line 2: cannot be read as CSV in UTF-8"),
        ("a,label\n1,rust\n", "class 'rust' not in the run"),
        ("a,label\n" + "".join(f"1,{i}\n" for i in range(10_001)), "more than 10000 different values"),
        (b"a,label\n" + b"1" * (16 * 2**20 + 1), "line 2: longer than"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    """Before anything is trained, with the file."""
    with pytest.raises(InputError, match=rf"d\.csv.*{message}"):
        open_data(DataSection(source="csv", train=str(write(tmp_path, text))), CLASSES, (1,))


def test_the_label_column_is_found_however_it_is_capitalised(tmp_path: Path) -> None:
    """The last column would do as labels, too: nobody would notice."""
    path = write(tmp_path, "Label,a,b\n2,7,0\n1,8,1\n")
    train, _ = open_data(DataSection(source="csv", train=str(path), test_fraction=0.0), ["0", "1", "2"], (2,))
    x, y = train.batch([0, 1])
    assert (x.tolist(), y.tolist()) == ([[7, 0], [8, 1]], [2, 1])


@pytest.mark.parametrize(
    ("header", "key"),
    [("a,label,b,Site", "site"), ("a,b,class,site", "site"), ("site,a,b,class", ""), ("a,user,b,label", "user")],
)
def test_a_key_is_no_part_of_the_sample(tmp_path: Path, header: str, key: str) -> None:
    """Wherever its column is; without a column `label` the last of the others has the labels. The key is a text."""
    columns = {"a": ["1", "2"], "b": ["3", "4"], "label": ["ok", "dent"], "site": ["7", "x"]}
    columns |= {"class": columns["label"], "user": columns["site"], "Site": columns["site"]}
    rows = zip(*(columns[name] for name in header.split(",")), strict=True)
    table = csv(write(tmp_path, "\n".join([header, *(",".join(row) for row in rows)])), key=key)
    (name,) = table.keys
    assert (name.lower(), table.keys[name]().tolist()) == (key or "site", ["7", "x"])
    read, convert = table.rows(np.arange(2), (2,))
    assert convert(read.take(np.array([1, 0]))).tolist() == [[2, 4], [1, 3]]
    assert table.labels.names == ("dent", "ok")
    assert table.held_bytes == 2 * (24 + 8)


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("a,site,label\n1,,ok\n", "site", "line 2: expected a site, got ''"),
        ("site,label\nx,ok\n", "site", "line 1: expected a column of numbers beside label and key, got none"),
        ("a,b,label\n1,2,ok\n", "label", "partition 'key:label' needs a key 'label' for each sample, got a, b"),
        ("a,b,label\n1,2,ok\n", "", "needs a key named key, person, subject, user, site or device .* got a, b"),
    ],
)
def test_a_key_that_is_not_there_is_named(tmp_path: Path, text: str, key: str, message: str) -> None:
    """With the columns that are."""
    with pytest.raises(InputError, match=rf"d\.csv.*{message}"):
        csv(write(tmp_path, text), key=key)


def test_a_file_that_shrinks_while_it_is_used_is_an_input_error(tmp_path: Path) -> None:
    """The offsets are of the file as it was."""
    path = write(tmp_path, GOOD)
    rows, _ = csv(path).rows(np.arange(3), (2,))
    path.write_text("a,label,b\n")
    with pytest.raises(InputError, match="has changed while it was read"):
        rows.take(np.arange(3))
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*d\.csv"):
        rows.take(np.arange(3))
