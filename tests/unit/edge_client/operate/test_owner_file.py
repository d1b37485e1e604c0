"""device.toml with its paths checked and its defaults shown."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.config.device_file import DataSection, DeviceFile, LimitsSection, load_device_file
from edge_client.errors import InputError, MachineError
from edge_client.operate import owner_file

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('data = {{ source = "npz", train = "{0}/no.npz" }}', ["data.train: ", "/no.npz does not exist"]),
        ('data = {{ source = "idx", train = "{0}", test = "{0}/t" }}', ["data.test: ", "/t does not exist"]),
        ('data = {{ source = "npz:{0}/no.npz" }}', ["data.train: ", "/no.npz does not exist"]),
        ('data = {{ source = "digits", partition = "file:{0}/p" }}', ["data.partition: ", "/p does not exist"]),
        ('data = {{ source = "digits", partition = "shards" }}', ["expected iid, dirichlet:ALPHA", "'shards'"]),
        ('data = {{ source = "npz:/a", train = "/b" }}', ["data.source = 'npz:/a' and data.train = '/b'"]),
        ('tasks = {{ defects = "{0}/defects.py:task" }}', ["tasks.defects: ", "/defects.py does not exist"]),
        (f'data = {{{{ source = "csv", train = "/{"x" * 300}" }}}}', ["data.train: cannot look at /xxx", "too long"]),
        ('data = {{ train = "{0}/a" }}\ntasks = {{ t = "{0}/t.py:task" }}', ["data.train: ", "tasks.t: "]),
    ],
)
def test_a_path_that_does_not_exist_is_named_with_its_key(tmp_path: Path, text: str, parts: list[str]) -> None:
    """All of them in one line."""
    path = tmp_path / "device.toml"
    path.write_text(text.format(tmp_path))
    with pytest.raises(InputError) as caught:
        owner_file.load(path)
    assert len(str(caught.value).splitlines()) == 1
    assert [part for part in (str(path), *parts) if part not in str(caught.value)] == []


def test_what_only_a_task_reads_may_be_anything(tmp_path: Path) -> None:
    """A database's address, for example."""
    (tmp_path / "t.py").write_text("task = None")
    (tmp_path / "device.toml").write_text(f'data = {{ train = "db:images" }}\ntasks = {{ t = "{tmp_path}/t.py:task" }}')
    device = owner_file.load(tmp_path / "device.toml")
    assert owner_file.task_hashes(device) == {"t": hashlib.sha256(b"task = None").hexdigest()}


def test_the_part_of_a_tasks_data_is_checked_too(tmp_path: Path) -> None:
    """Part 5 of 3: no worker could find it."""
    (tmp_path / "t.py").write_text("task = None")
    data = 'data = { partition = "iid", part = [5, 3] }'
    (tmp_path / "device.toml").write_text(f'{data}\ntasks = {{ t = "{tmp_path}/t.py:task" }}')
    with pytest.raises(InputError, match=r"data.part: expected \[i, n\] with 0 <= i < n, got \[5, 3\]"):
        owner_file.load(tmp_path / "device.toml")


def test_a_file_in_a_place_that_may_not_be_looked_at_is_told(tmp_path: Path) -> None:
    """As for one in a directory of another user, whose error a test as root cannot have."""
    with pytest.raises(MachineError, match=r"cannot look at .*File name too long"):
        owner_file.load(tmp_path / ("x" * 300))


def test_the_whole_file_is_shown(tmp_path: Path) -> None:
    """Defaults, sizes in bytes, `auto`, the hash of a task."""
    (tmp_path / "t.py").write_text("x")
    path = tmp_path / "device.toml"
    tasks = f'tasks = {{ t = "{tmp_path}/t.py:task" }}'
    path.write_text(f'data = {{ source = "digits" }}\nlabels = {{ line_a = "1" }}\n{tasks}')
    text = owner_file.to_toml(owner_file.load(path))
    digest = hashlib.sha256(b"x").hexdigest()
    for line in ('memory = "auto"', "disk = 4000000000", "test-fraction = 0.2", 'line_a = "1"', f"# sha256 {digest}"):
        assert line in text
    limits = owner_file.to_json(owner_file.load(path))["limits"]
    assert limits == {"memory": "auto", "disk": 4 * 10**9, "calibrate": True, "reconnect": 60.0, "deploy": True}


@given(
    labels=st.dictionaries(texts, texts, max_size=4),
    rename=st.dictionaries(texts, texts, max_size=4),
    memory=st.none() | st.integers(0, 10**12),
    train=texts,
)
def test_what_is_shown_can_be_read_again(
    tmp_path_factory: pytest.TempPathFactory,
    labels: dict[str, str],
    rename: dict[str, str],
    memory: int | None,
    train: str,
) -> None:
    """The same device, whatever its owner wrote."""
    device = DeviceFile(
        data=DataSection(train=train, part=(1, 3)),
        labels=labels,
        rename=rename,
        limits=LimitsSection(memory=memory),
    )
    path = tmp_path_factory.getbasetemp() / "again.toml"
    path.write_text(owner_file.to_toml(device), encoding="utf-8", newline="")
    assert load_device_file(path) == device
