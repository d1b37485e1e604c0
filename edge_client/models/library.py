"""Models of libraries by name: `timm:mobilenetv3_small_100`, `torchvision:resnet18`. Names are read without torch.

The library must be installed where a model is built, on the server and on each device. Only names and a few numbers
come from a run: nothing that a run can say makes a library download weights or open a file.
Does not cover: pretrained weights, units (`found_units`), models of one's own (`user_module`).
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from edge_client.errors import InputError, NoSuchNameError
from edge_client.records import Between
from edge_client.user_code import UserCode

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LibraryMissingError", "LibraryOptions", "build", "check", "expand", "is_of_library", "version"]

_LIBRARIES = ("timm", "torchvision")
_LACKS_OPERATORS = "operator torchvision::"  # the wheel of another torch: its compiled operators cannot be loaded
_OPERATORS = ("nms", "qnms")  # that classifiers never call


class LibraryMissingError(InputError):
    """The library of a model is not installed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryOptions:
    """Options of a library's models."""

    drop_rate: Annotated[float, Between(0, 1)] | None = field(
        default=None, metadata={"help": "dropout before the classifier, where the model has it"}
    )
    drop_path_rate: Annotated[float, Between(0, 1)] | None = field(
        default=None, metadata={"help": "share of blocks that are left out at random, where the model has it"}
    )


def is_of_library(name: str) -> bool:
    """Whether a model's name is LIBRARY:NAME."""
    return ":" in name


def check(name: str, shape: Sequence[int], options: LibraryOptions) -> None:
    """Raise `InputError` for a library that is not installed or known, or a shape that is no image's."""
    library = name.partition(":")[0]
    if library not in _LIBRARIES:
        raise NoSuchNameError.of("library", library, list(_LIBRARIES))
    if importlib.util.find_spec(library) is None:
        raise LibraryMissingError(f"{library} is not installed on this device: pip install {library}")
    if len(shape) != 3:
        raise InputError(f"model {name!r} needs an input of channels, height, width, got {list(shape)}")


def version(name: str) -> str:
    """The installed version of the library of a model; empty for other models, or without it."""
    if not is_of_library(name):
        return ""
    try:
        return metadata.version(name.partition(":")[0])
    except metadata.PackageNotFoundError:
        return ""


def build(name: str, shape: Sequence[int], num_classes: int, options: LibraryOptions) -> nn.Module:
    """The module with random weights from torch's global generator; raises `InputError` or `NoSuchNameError`."""
    library, _, model = name.partition(":")
    module = _load(library)
    known = _names(library, module)
    if model not in known:
        near = difflib.get_close_matches(model, known, n=3) or known[:3]
        raise NoSuchNameError(f"unknown model {name!r}; near: {', '.join(f'{library}:{other}' for other in near)}")
    with UserCode(f"model {name!r}", "building it"):
        built: nn.Module = (_timm if library == "timm" else _torchvision)(module, model, shape, num_classes, options)
    return built


def expand(patterns: str) -> list[str]:
    """The names of all models that the patterns stand for, such as `timm:mobilenet*,torchvision:resnet18`."""
    expanded: list[str] = []
    for pattern in filter(None, (text.strip() for text in patterns.split(","))):
        library, _, rest = pattern.partition(":")
        if not is_of_library(pattern):
            expanded.append(pattern)
            continue
        check(pattern, (3, 1, 1), LibraryOptions())
        names = fnmatch.filter(_names(library, _load(library)), rest)
        if not names:
            raise InputError(f"--models: {pattern!r} matches no model of {library}")
        expanded += [f"{library}:{name}" for name in names]
    return list(dict.fromkeys(expanded))


def _timm(timm: Any, model: str, shape: Sequence[int], num_classes: int, options: LibraryOptions) -> nn.Module:
    settings = {key: value for key, value in _settings(options).items() if value is not None}
    sizes: dict[str, Any] = {"num_classes": num_classes, "in_chans": shape[0], "pretrained": False, **settings}
    if "img_size" in inspect.signature(type(_on_meta(timm, model)).__init__).parameters:
        sizes["img_size"] = tuple(shape[1:])
    built: nn.Module = timm.create_model(model, **sizes)
    return built


def _on_meta(timm: Any, model: str) -> Any:
    """The model without memory: its class tells what it can be asked."""
    import torch

    with torch.device("meta"):
        return timm.create_model(model, pretrained=False)


def _torchvision(
    library: Any, model: str, shape: Sequence[int], num_classes: int, options: LibraryOptions
) -> nn.Module:
    if shape[0] != 3:
        raise InputError(f"model 'torchvision:{model}' takes images of 3 channels, got {list(shape)}; timm has others")
    settings: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    taken = inspect.signature(library.models.get_model_builder(model)).parameters
    if model in ("googlenet", "inception_v3"):  # their further heads are for training from nothing
        settings |= {"aux_logits": False, "init_weights": True}
    if model.startswith("vit_"):
        settings["image_size"] = shape[1]
    if options.drop_rate is not None and "dropout" in taken:
        settings["dropout"] = options.drop_rate
    built: nn.Module = library.models.get_model(model, **settings)
    return built


def _settings(options: LibraryOptions) -> dict[str, float | None]:
    return {"drop_rate": options.drop_rate, "drop_path_rate": options.drop_path_rate}


def _names(library: str, module: Any) -> list[str]:
    """The classifiers of a library."""
    return list(module.list_models()) if library == "timm" else list(module.models.list_models(module=module.models))


def _load(library: str) -> ModuleType:
    """The library; torchvision's wheel for another torch is usable, too, as its operators are not needed."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise LibraryMissingError(f"{library} cannot be loaded: {error}; pip install --upgrade {library}") from error
    except RuntimeError as error:
        if _LACKS_OPERATORS not in str(error):
            raise InputError(f"{library} cannot be loaded: {error}") from error
    for name in [name for name in sys.modules if name.partition(".")[0] in _LIBRARIES]:
        del sys.modules[name]
    _declare_operators()
    return importlib.import_module(library)


_DECLARED: list[object] = []  # a declaration lasts as long as its object


def _declare_operators() -> None:
    import torch

    if _DECLARED:
        return
    fragment: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in _OPERATORS:
        fragment.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.append(fragment)
