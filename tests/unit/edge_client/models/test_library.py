"""Models of libraries by name: refused with what to do, built without a download, and nothing else can be asked for."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import InputError, NoSuchNameError
from edge_client.models import library, registry
from edge_client.worker.declined import DeclinedError, declines

HAS_TIMM = importlib.util.find_spec("timm") is not None


def run_of(name: str, **options: Any) -> RunFile:
    table = {"name": "r", "classes": ["a", "b"], "model": {"name": name, "input": [3, 64, 64], **options}}
    return parse_table(RunFile, table, source="run.toml")


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:mobilenet_v3_small", "small-cnn"])
def test_a_run_may_name_a_model_of_a_library(name: str) -> None:
    """The library's name, a colon, the name that the library knows."""
    model = run_of(name).model
    assert model is not None
    assert model.name == name


@pytest.mark.parametrize("name", ["timm:hf-hub:user/model", "timm:../x", "timm:", ":x", "Timm:resnet18", "timm:a b"])
def test_names_that_could_be_more_than_names_are_refused(name: str) -> None:
    """No second colon, no path: a name never makes a library look elsewhere."""
    with pytest.raises(InputError):
        run_of(name)


@pytest.mark.parametrize("key", ["pretrained", "checkpoint-path", "cache-dir", "weights"])
def test_no_option_opens_a_file_or_a_connection(key: str) -> None:
    """Only numbers of the library's models can be set."""
    with pytest.raises(InputError, match=key):
        registry.validate("timm:resnet18", (3, 64, 64), {key: "x"})


def test_a_library_that_is_missing_declines_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is `library_missing`, and the message can be typed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeclinedError, match="pip install timm") as declined, declines("bad_model"):
        registry.validate("timm:resnet18", (3, 64, 64), {})
    assert declined.value.code == "library_missing"


def test_an_unknown_library_names_those_that_are_known() -> None:
    """timm and torchvision."""
    with pytest.raises(NoSuchNameError, match="timm, torchvision"):
        registry.validate("keras:resnet", (3, 64, 64), {})


@pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed")
def test_a_model_of_timm_is_built_for_the_samples_and_classes_of_the_run() -> None:
    """One channel, 32 pixels, two classes; a typo names what is near; a pattern stands for all that match."""
    module: Any = library.build("timm:vit_tiny_patch16_224", (1, 32, 32), 2, library.LibraryOptions())
    assert module.patch_embed.proj.in_channels == 1
    assert module.pos_embed.shape[1] == 1 + 4
    assert module.head.out_features == 2
    with pytest.raises(NoSuchNameError, match="near: timm:mobilenetv3_small_100"):
        library.build("timm:mobilenetv3_small_10", (3, 32, 32), 2, library.LibraryOptions())
    assert "timm:mobilenetv3_small_100" in library.expand("timm:mobilenetv3_small*")
    with pytest.raises(InputError, match="matches no model of timm"):
        library.expand("timm:nothing*")
