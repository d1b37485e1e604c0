"""What an owner may write into `device.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_client.config.device_file import DeviceFile, load_device_file
from edge_client.errors import InputError


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_device_file_is_read(tmp_path: Path) -> None:
    """A budget with a unit, labels, and defaults for an empty file."""
    text = '[limits]\nmemory = "1.5GB"\n[labels]\nsite = "north"\n[data]\nsource = "digits"\npart = [1, 4]\n'
    device = load_device_file(_write(tmp_path, text))
    assert device.limits.memory == 1_500_000_000
    assert device.labels == {"site": "north"}
    assert device.data is not None
    assert device.data.part == (1, 4)
    assert load_device_file(_write(tmp_path, "")) == DeviceFile()


@pytest.mark.parametrize(
    "labels", [{f"k{i}": "v" for i in range(65)}, {f"k{i}": "ü" * 2000 for i in range(3)}], ids=["many", "long"]
)
def test_labels_must_fit_one_message(tmp_path: Path, labels: dict[str, Any]) -> None:
    """Otherwise the device could never say hello."""
    text = "[labels]\n" + "".join(f'{key} = "{value}"\n' for key, value in labels.items())
    with pytest.raises(InputError, match="at most 64 labels and 8192 bytes"):
        load_device_file(_write(tmp_path, text))
