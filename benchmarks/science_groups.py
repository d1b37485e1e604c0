"""The papers' relations that `benchmarks.science` checks: which runs are compared, in which setting, what should be.

Settings follow the papers where two cores allow it: devices of several sizes, Dirichlet 0.5, Adam 1e-3, the methods'
own parameters as papers or their code have them (mu/2 = 0.05 in FedProx and FedIN, alpha = 0.5 in Felo, Velo, FedHe).
Models are narrow, data is a subset, and rounds are few: every number of it stands in the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GROUPS", "PUBLIC", "WIDTHS", "Group", "Relation", "Setting"]

_DEPTHS = ["full", "depth:2.2.3.3", "depth:2.2.2.2", "depth:1.1.2.2", "depth:1.1.1.1"]  # ResNet26, 22, 18, 14, 10
# below a quarter, at these sizes, not even one block of the whole model fits the memory of the narrow one
WIDTHS = ["full", "width:3/4", "width:1/2", "width:1/4"]
# beside ResNet50, whose features are four times as wide as those of the others
_SMALLER = ("resnet34", "resnet26", "resnet18", "resnet10")
_EXTREME: dict[str, Any] = {"slices": ["full", *_SMALLER], "models": {name: {"base-width": 8} for name in _SMALLER}}

_MIXED: dict[str, Any] = {"slices": ["full", "depth:2.2.2.2", "depth:1.1.1.1", "width:1/2", "depth:1.1.1.1-width:1/2"]}
# ResNet26 and ResNet10, two DenseNets, a plain CNN
_FAMILIES: dict[str, Any] = {
    "slices": ["full", "resnet10", "densenet169", "densenet121", "small-cnn"],
    "models": {
        **{name: {"growth": 4, "base-width": 8} for name in ("densenet169", "densenet121")},
        "small-cnn": {"width": 8},
    },
}
PUBLIC = "public"  # stands for the file of shared samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """What a paper says: one method is better than another, or about as good."""

    better: str
    worse: str
    source: str
    about: bool = False
    whole: bool = False  # of the whole model alone in the end, if a run has it, not the mean over the sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Data, model and rounds that all runs of a group have in common."""

    name: str  # of the folders of runs: groups with the same setting share them
    data: str = "fashion-mnist"
    samples: int = 6000
    tests: int = 2000
    model: str = "resnet26"
    width: int = 8  # of the first stage
    rounds: int = 20
    every: int = 2  # rounds from one evaluation to the next
    devices: int = 20
    fraction: float = 0.5
    batch: int = 32
    partition: str = "dirichlet:0.5"
    public: int = 0  # samples without labels that all devices share, from the end of the training set

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a sample."""
        return (3, 32, 32) if self.data == "cifar10" else (1, 28, 28)

    def to_map(self) -> dict[str, Any]:
        """For the results."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that are compared, and what should come out."""

    setting: Setting
    runs: Mapping[str, dict[str, Any]]  # name -> what it changes in the run file
    relations: Sequence[Relation]
    by_budget: Sequence[str] = ()  # runs that get the memory of the widths instead of their slices
    on_devices: Sequence[str] = field(default=("FedHe", "Local", "FedMD", "DraftFed"))  # where models live there


_ONE_EACH = "FedAvg, one model per architecture"
_LAYERS = "FedAvg, layer by layer"
_SMALLEST = "FedAvg, smallest model"
_SAME: dict[str, Any] = {"slices": _DEPTHS, "sharing": "architecture"}
_BY_LAYER: dict[str, Any] = {"slices": _DEPTHS}
_FEDIN = {"name": "fedin", "mu": 0.1}
_FEDPROX = _BY_LAYER | {"method": {"name": "fedprox", "mu": 0.1}}

_DEPTH_RUNS: dict[str, dict[str, Any]] = {
    _ONE_EACH: _SAME,
    _LAYERS: _BY_LAYER,
    "InCo over FedAvg": _BY_LAYER | {"method": {"name": "inco+fedavg"}},
}
_DEPTH_RELATIONS = [
    Relation(better=_LAYERS, worse=_ONE_EACH, source="InCo, Table 5: 64.8 against 52.3 on CIFAR-10"),
    Relation(better="InCo over FedAvg", worse=_LAYERS, source="InCo, Table 5: 67.8 against 64.8"),
]
_FEDIN_RELATIONS = [
    Relation(better="FedIN", worse="FedProx", source="FedIN, Table 3: 75.9 against 72.0 on CIFAR-10"),
    Relation(better="FedProx", worse=_LAYERS, source="FedIN, Table 3: 72.0 against 66.2"),
    Relation(better="FedIN", worse=_LAYERS, source="FedIN, Table 3: 75.9 against 66.2"),
]
_WIDTH_RUNS: dict[str, dict[str, Any]] = {
    _SMALLEST: {"slices": WIDTHS[-1:]},
    "HeteroFL": {"method": {"name": "heterofl"}, "slices": WIDTHS},
    "FedRolex": {"method": {"name": "fedrolex"}, "slices": WIDTHS},
    "FeDepth": {"method": {"name": "fedepth"}},
    "FeDepth, epochs split": {"method": {"name": "fedepth", "budget-mode": "split"}},
    "m-FeDepth": {"method": {"name": "m-fedepth"}},
    # widths and exits go down together, as in its code
    "ScaleFL": {
        "method": {"name": "scalefl"},
        "slices": ["full", "exit:8-width:3/4", "exit:6-width:1/2", "exit:3-width:1/4"],
    },
    "SplitMix": {"method": {"name": "splitmix", "bases": 4}, "slices": WIDTHS},
}
_ABOVE_SMALLEST = "InCo: AllSmall has 39.2 on CIFAR-10, all others far more"


def _above(name: str) -> Relation:
    return Relation(better=name, worse=_SMALLEST, source=_ABOVE_SMALLEST)


_WHOLE = "their authors' tests judge the server's model alone"
_ALL_ABOVE = [_above(name) for name in ("HeteroFL", "FedRolex", "ScaleFL", "SplitMix")]
_ALL_ABOVE += [dataclasses.replace(relation, source=_WHOLE, whole=True) for relation in _ALL_ABOVE]
_FEDEPTH = "FeDepth: +5.4 on CIFAR-10 at equal memory, in the mean"
_ABOVE_HETEROFL = [
    Relation(better="FeDepth", worse="HeteroFL", source=_FEDEPTH),
    Relation(better="m-FeDepth", worse="HeteroFL", source=_FEDEPTH),
    Relation(better="FeDepth, epochs split", worse="HeteroFL", source="the same with as many local epochs"),
]
_ABOVE_HETEROFL += [dataclasses.replace(relation, whole=True) for relation in _ABOVE_HETEROFL]
_BUDGETED = ("FeDepth", "FeDepth, epochs split", "m-FeDepth")


def _some(*names: str) -> dict[str, dict[str, Any]]:
    return {name: _WIDTH_RUNS[name] for name in names}


_FASHION = Setting(name="fashion-depth")
# as in the papers: no running statistics, which models of different width cannot share (group `statistics`)
_WIDE = Setting(name="fashion-sizes", model="preresnet20", rounds=8)


def _drafts(name: str, models: dict[str, Any], paper: str) -> Group:
    """As in the paper all devices take part, with equal shares."""
    return Group(
        setting=Setting(name=name, samples=3000, devices=10, fraction=1.0, partition="iid", public=512),
        runs={
            "Local": models | {"method": {"name": "local"}},
            "DraftFed": models | {"method": {"name": "draftfed", "public": PUBLIC}},
        },
        relations=[Relation(better="DraftFed", worse="Local", source=f"DraftFed: {paper} on CIFAR-10")],
    )


GROUPS = {
    "depth": Group(setting=_FASHION, runs=_DEPTH_RUNS, relations=_DEPTH_RELATIONS),
    "fedin": Group(
        setting=_FASHION,
        runs={
            _LAYERS: _BY_LAYER,
            "FedProx": _FEDPROX,
            "FedIN": _BY_LAYER | {"method": _FEDIN},
        },
        relations=_FEDIN_RELATIONS,
    ),
    "felo": Group(
        setting=_FASHION,
        runs={
            _ONE_EACH: _SAME,
            "FedHe": _SAME | {"method": {"name": "fedhe"}},
            "Felo": _SAME | {"method": {"name": "felo"}},
            "Velo": _SAME | {"method": {"name": "velo"}},
        },
        relations=[
            Relation(better="Felo", worse="FedHe", source="Felo, Table 3: 52.6 against 39.0 on CIFAR-10"),
            Relation(better="Velo", worse="Felo", source="Felo: 57.2 against 56.9", about=True),
            Relation(better="Felo", worse=_ONE_EACH, source="Felo: beats FedAvg, with one exception in its table"),
        ],
    ),
    "extreme": Group(
        setting=Setting(name="fashion-extreme", model="resnet50"),
        runs={
            "Felo": _EXTREME | {"method": {"name": "felo"}},
            "Velo": _EXTREME | {"method": {"name": "velo"}},
        },
        relations=[Relation(better="Velo", worse="Felo", source="Felo, Table 3: 56.9 against 52.6 on CIFAR-10")],
    ),
    "drafts": _drafts("fashion-drafts", _MIXED, "64.2 against 62.8"),
    "families": _drafts("fashion-families", _FAMILIES, "69.7 against 68.6 with DenseNets"),
    "width": Group(
        setting=_WIDE,
        runs=_some(_SMALLEST, "HeteroFL", "FedRolex", "ScaleFL", "SplitMix"),
        relations=_ALL_ABOVE,
    ),
    "memory": Group(
        setting=dataclasses.replace(_WIDE, name="fashion-memory", rounds=30, every=3),
        by_budget=_BUDGETED,
        runs=_some("HeteroFL", *_BUDGETED),
        relations=_ABOVE_HETEROFL,
    ),
    "statistics": Group(
        setting=Setting(name="fashion-width", width=16, rounds=15, every=3),
        by_budget=("HeteroFL", "FedRolex"),
        runs=_some(_SMALLEST, "HeteroFL", "FedRolex"),
        relations=[_above("HeteroFL"), _above("FedRolex")],
    ),
    "ablation": Group(
        setting=_FASHION,
        runs={
            "FedIN": _BY_LAYER | {"method": _FEDIN},
            "FedProx": _FEDPROX,  # FedIN without IN
            "FedIN without opt": _BY_LAYER | {"method": _FEDIN | {"alleviation": "sequential"}},
            "FedIN without prox": _BY_LAYER | {"method": _FEDIN | {"mu": 0.0}},
        },
        relations=[
            Relation(better="FedIN", worse="FedIN without opt", source="FedIN, Table 7: 75.9 against 74.9"),
            Relation(better="FedIN without opt", worse="FedProx", source="FedIN, Table 7: 74.9 against 72.0 w/o IN"),
            Relation(better="FedProx", worse="FedIN without prox", source="FedIN, Table 7: 72.0 w/o IN, 66.4 w/o prox"),
        ],
    ),
    "longer": Group(
        setting=Setting(name="fashion-longer", rounds=30, every=3),
        runs=_DEPTH_RUNS | {"FedProx": _FEDPROX, "FedIN": _BY_LAYER | {"method": _FEDIN}},
        relations=[*_DEPTH_RELATIONS, *_FEDIN_RELATIONS],
    ),
    "cifar-depth": Group(
        setting=Setting(name="cifar-depth", data="cifar10", samples=20000, batch=64),
        runs=_DEPTH_RUNS,
        relations=_DEPTH_RELATIONS,
    ),
    "cifar-width": Group(
        setting=dataclasses.replace(_WIDE, name="cifar-sizes", data="cifar10"),
        by_budget=_BUDGETED,
        runs=_WIDTH_RUNS,
        relations=[*_ALL_ABOVE, *_ABOVE_HETEROFL],
    ),
}
