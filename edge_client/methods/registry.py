"""The methods by name. Names and parameters are checked without torch; `get` loads the method itself.

A name may put methods over another: `fedepth+fedprox` is FeDepth whose devices minimise what FedProx tells. The last
part is the method underneath; those before it say in the registry that they can be put over one, and a method may
refuse to be under another. Their parameters stand in one table.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from edge_client.config.files import describe, parse_table
from edge_client.config.run_file import RunFile
from edge_client.errors import InputError, NoSuchNameError
from edge_client.knowledge.schema import CLASS_KINDS, MIN_COUNT_FLOOR, KnowledgeRules, Limits
from edge_client.methods import user_methods as own_methods
from edge_client.methods.base import Method, PlanRules
from edge_client.methods.entry import Entry, any_slice, no_choice
from edge_client.methods.parameters import (
    KEPT_ANCHOR_BYTES,
    DraftFedParameters,
    FedAvgParameters,
    FeDepthParameters,
    FedGktParameters,
    FedHeParameters,
    FedInParameters,
    FedMdParameters,
    FedNovaParameters,
    FedPerParameters,
    FedProtoParameters,
    FedProxParameters,
    FedRolexParameters,
    FeloParameters,
    HeteroFLParameters,
    InclusiveFLParameters,
    InCoParameters,
    LocalParameters,
    MoonParameters,
    ScaffoldParameters,
    ScaleFLParameters,
    SplitMixParameters,
    VeloParameters,
)
from edge_client.methods.slices import WHOLE_MODEL, Slicing, drawn, mixed, rolled
from edge_client.models import registry as models
from edge_client.models.slicing import SliceSpec
from edge_client.models.slicing import parse as parse_slice

__all__ = [
    "get",
    "has_global_model",
    "knowledge",
    "knowledge_limits",
    "mixes_widths",
    "named",
    "names",
    "of_run",
    "parameter_types",
    "plan_rules",
    "rungs",
    "sharing",
    "slicing",
    "trains_as",
    "usual_model",
    "validate",
]


def _from(module: str, **how: Any) -> Callable[..., Method]:
    """What makes a method: `method` of a module of this package, which is imported when it is called."""

    def load(parameters: Any, *base: Method, **more: Any) -> Method:
        made: Method = import_module(f"{__package__}.{module}").method(parameters, *base, **how, **more)
        return made

    return load


def _fedepth_plans(parameters: FeDepthParameters) -> PlanRules:
    return PlanRules(
        groups=True,
        partial=parameters.partial,
        max_models=parameters.mutual,
        masked=parameters.averaging == "masked",
        cost=parameters.cost,
    )


def _m_fedepth_plans(parameters: FeDepthParameters) -> PlanRules:
    return dataclasses.replace(_fedepth_plans(parameters), auxiliary=True)


def _fedprox_plans(parameters: FedProxParameters) -> PlanRules:
    """Of one parameter at a time the anchor, which becomes the proximal term's gradient; small anchors stay."""
    return PlanRules(step_copies=1, kept_bytes=KEPT_ANCHOR_BYTES) if parameters.mu > 0 else PlanRules()


def _scaffold_plans(parameters: ScaffoldParameters) -> PlanRules:
    """The received weights and the correction."""
    return PlanRules(weight_copies=2) if parameters.correction else PlanRules()


def _moon_plans(parameters: MoonParameters) -> PlanRules:
    """The received model and the previous one; they run without gradient before the trained one does, and need less."""
    return PlanRules(weight_copies=2) if parameters.mu > 0 else PlanRules()


def _whole_model(parameters: Any) -> Slicing:
    return Slicing(kinds=(), instead="it fits the whole model into the memory by training it in groups")


def _fedin_plans(parameters: FedInParameters) -> PlanRules:
    """As FedProx; all gradients are there while the pairs go through; where two are compared, both are."""
    projects, steps = parameters.alleviation == "projection", parameters.alleviation == "sequential"
    apart = projects or (not steps and parameters.rescale_outer)
    return PlanRules(
        step_copies=2 if projects else int(parameters.mu > 0),
        kept_bytes=KEPT_ANCHOR_BYTES if parameters.mu > 0 else 0,
        again=parameters.pairs,
        apart=apart and parameters.pairs > 0,
        optimizers=2 if steps and parameters.pairs else 1,
    )


def _fedmd_plans(parameters: FedMdParameters) -> PlanRules:
    """Learning from shared samples has an optimizer of its own, whose state stays."""
    return PlanRules(optimizers=2) if parameters.digest_epochs else PlanRules()


def _draftfed_plans(parameters: DraftFedParameters) -> PlanRules:
    """The same; and it looks inside of units."""
    return PlanRules(optimizers=2, recomputes=False) if parameters.draft_epochs else PlanRules()


def _fedin_knowledge(parameters: FedInParameters) -> KnowledgeRules:
    kinds = ("pairs",) if parameters.pairs else ()
    return KnowledgeRules(kinds=kinds, per_device=True, max_rows=parameters.pairs)


def _felo_slicing(parameters: FeloParameters) -> Slicing:
    return Slicing(sharing="architecture")


def _felo_knowledge(parameters: FeloParameters) -> KnowledgeRules:
    return KnowledgeRules(kinds=CLASS_KINDS if parameters.alpha > 0 else ())


_WIDTHS = ("full", "width:1/2", "width:1/4", "width:1/8", "width:1/16")
_ONLY_WIDTHS = "layer-wise sharing of other slices is fedavg's"


def _heterofl_slicing(parameters: HeteroFLParameters) -> Slicing:
    made = Slicing(ladder=_WIDTHS, kinds=("width",), instead=_ONLY_WIDTHS)
    return dataclasses.replace(made, turn=drawn) if parameters.redraw else made


def _fedrolex_slicing(parameters: FedRolexParameters) -> Slicing:
    made = Slicing(ladder=_WIDTHS, kinds=("width",), instead=_ONLY_WIDTHS)
    return dataclasses.replace(made, turn=rolled) if parameters.roll else made


def _inclusivefl_slicing(parameters: InclusiveFLParameters) -> Slicing:
    return Slicing(kinds=("depth", "layers"), instead="widths are heterofl's", apart=False)


def _scalefl_slicing(parameters: ScaleFLParameters) -> Slicing:
    return Slicing(kinds=("exit", "width"), instead="depth and layers are inclusivefl's", apart=False)


def _splitmix_slicing(parameters: SplitMixParameters) -> Slicing:
    ladder = tuple(f"width:1/{n}" if n > 1 else "full" for n in (1, 2, 4, 8, 16, 32, 64) if n <= parameters.bases)
    return Slicing(
        ladder=ladder,
        kinds=("width",),
        instead="a base network has all blocks",
        turn=partial(mixed, parameters.bases),
        apart=False,
        split=parameters.bases > 1,
    )


def _splitmix_plans(parameters: SplitMixParameters) -> PlanRules:
    """Weights, gradients and an optimizer's state of the other bases, of a device that has all of them."""
    return PlanRules(weight_copies=3 * (parameters.bases - 1))


_MAX_DRAFT_BYTES = 2**30
_GROUPS = dict.fromkeys(("fedepth", "m-fedepth"), "its rule is for a model whose parts are trained at once")
_KNOWING = _GROUPS | {"inco": "its rule is for methods that share weights and nothing else"}
_METHODS = {
    "fedavg": Entry(FedAvgParameters, _from("fedavg")),
    "fedprox": Entry(FedProxParameters, _from("fedprox"), plans=_fedprox_plans),
    "scaffold": Entry(ScaffoldParameters, _from("scaffold"), plans=_scaffold_plans, refuses=_GROUPS, sized=True),
    "fednova": Entry(FedNovaParameters, _from("fednova"), refuses=_GROUPS, as_plain=True),
    "moon": Entry(MoonParameters, _from("moon"), plans=_moon_plans, refuses=_GROUPS),
    "fedper": Entry(
        FedPerParameters,
        _from("fedper"),
        refuses=_GROUPS,
        has_global_model=lambda own: own.personal == 0,
        sized=True,
    ),
    "heterofl": Entry(HeteroFLParameters, _from("heterofl"), refuses=_GROUPS, slicing=_heterofl_slicing),
    "fedrolex": Entry(FedRolexParameters, _from("fedrolex"), refuses=_GROUPS, slicing=_fedrolex_slicing, as_plain=True),
    "inclusivefl": Entry(
        InclusiveFLParameters,
        _from("inclusivefl"),
        refuses=_GROUPS,
        slicing=_inclusivefl_slicing,
        sized=True,
        as_plain=True,
    ),
    "scalefl": Entry(ScaleFLParameters, _from("scalefl"), refuses=_GROUPS, slicing=_scalefl_slicing, sized=True),
    "splitmix": Entry(
        SplitMixParameters,
        _from("splitmix"),
        plans=_splitmix_plans,
        refuses=_GROUPS | {"inco": "its bases have no layers in common"},
        slicing=_splitmix_slicing,
        sized=True,
    ),
    "local": Entry(
        LocalParameters,
        _from("local"),
        refuses=_GROUPS | {"inco": "it shares nothing that could be changed"},
        has_global_model=lambda own: False,
        shares_weights=False,
    ),
    "felo": Entry(FeloParameters, _from("felo"), refuses=_KNOWING, slicing=_felo_slicing, knowledge=_felo_knowledge),
    "velo": Entry(
        VeloParameters,
        _from("velo"),
        refuses=_KNOWING,
        slicing=_felo_slicing,
        knowledge=lambda own: dataclasses.replace(_felo_knowledge(own), studies=True),
    ),
    "fedhe": Entry(
        FedHeParameters,
        _from("fedhe"),
        refuses=_KNOWING,
        has_global_model=lambda own: False,
        shares_weights=False,
        knowledge=lambda own: KnowledgeRules(kinds=("class/logit",)),
    ),
    "fedproto": Entry(
        FedProtoParameters,
        _from("fedproto"),
        refuses=_KNOWING,
        has_global_model=lambda own: False,
        shares_weights=False,
        knowledge=lambda own: KnowledgeRules(kinds=("class/feature",)),
    ),
    "fedmd": Entry(
        FedMdParameters,
        _from("fedmd"),
        plans=_fedmd_plans,
        refuses=_KNOWING,
        has_global_model=lambda own: False,
        shares_weights=False,
        knowledge=lambda own: KnowledgeRules(kinds=("logits",), public=True, max_rows=own.public_samples),
    ),
    "draftfed": Entry(
        DraftFedParameters,
        _from("draftfed"),
        plans=_draftfed_plans,
        refuses=_KNOWING,
        has_global_model=lambda own: False,
        shares_weights=False,
        knowledge=lambda own: KnowledgeRules(
            kinds=("drafts",), public=True, max_rows=own.public_samples, max_bytes=_MAX_DRAFT_BYTES
        ),
    ),
    "fedgkt": Entry(
        FedGktParameters,
        _from("fedgkt"),
        refuses=_KNOWING,
        has_global_model=lambda own: False,
        shares_weights=False,
        knowledge=lambda own: KnowledgeRules(
            kinds=("maps",), per_device=True, max_rows=10**6, max_bytes=own.max_bytes + 2**20
        ),
    ),
    "fedin": Entry(FedInParameters, _from("fedin"), plans=_fedin_plans, refuses=_KNOWING, knowledge=_fedin_knowledge),
    "fedepth": Entry(FeDepthParameters, _from("fedepth"), over=True, plans=_fedepth_plans, slicing=_whole_model),
    "m-fedepth": Entry(
        FeDepthParameters,
        _from("fedepth", auxiliary=True),
        over=True,
        plans=_m_fedepth_plans,
        slicing=_whole_model,
    ),
    "inco": Entry(InCoParameters, _from("inco"), over=True, shown_with="preresnet20", as_plain=True),
}
_PLAIN = "fedavg"  # what a method is put over that names none


def _find(part: str) -> Entry | None:
    """One of these, or one that a simulation tries."""
    return _METHODS.get(part) or own_methods.find(part)


def _entry(part: str) -> Entry:
    """Of a part that is known."""
    found = _find(part)
    assert found is not None
    return found


def names() -> list[str]:
    """All methods and all pairs of them, sorted."""
    over = [name for name, entry in _METHODS.items() if entry.over]
    under = [name for name, entry in _METHODS.items() if not entry.over and name != _PLAIN]
    pairs = (f"{name}+{base}" for name in over for base in under if name not in _METHODS[base].refuses)
    return sorted([*_METHODS, *pairs])


def validate(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise `NoSuchNameError` for an unknown method, `InputError` for a parameter it does not have or cannot use."""
    _parse(name, parameters)


def plan_rules(name: str, parameters: Mapping[str, Any]) -> PlanRules:
    """What a planner may choose for the devices of a run; raises as `validate` does. Free of torch."""
    parts = _parse(name, parameters)
    every = [_entry(part).plans(parsed) for part, parsed in parts]
    decides = next((number for number, (part, _) in enumerate(parts) if _decides(part)), 0)
    return dataclasses.replace(
        every[decides],  # says how a device trains; what others keep and make comes on top
        weight_copies=sum(rules.weight_copies for rules in every),
        step_copies=max(rules.step_copies for rules in every),
        kept_bytes=sum(rules.kept_bytes for rules in every),
        again=max(rules.again for rules in every),
        apart=any(rules.apart for rules in every),
        optimizers=max(rules.optimizers for rules in every),
        recomputes=all(rules.recomputes for rules in every),
    )


def slicing(name: str, parameters: Mapping[str, Any]) -> Slicing:
    """What the method says about slices: the first part of its name that says something; raises as `validate` does."""
    parts = _parse(name, parameters)
    said = [(part, own) for part, own in parts if _entry(part).slicing is not any_slice]
    part, own = next(iter(said), parts[-1])
    found = _entry(part).slicing(own)
    if any(_entry(part).over for part, _ in parts):  # which combine the layers of one model
        found = dataclasses.replace(found, kinds=tuple(kind for kind in found.kinds if kind != "model"))
    return found


def sharing(run: RunFile) -> str:
    """`position` or `architecture`: what the run says, or its method does; raises as `validate` does."""
    if run.sharing != "auto":
        return run.sharing
    if any(named(run, text).model for text in run.slices):
        return "architecture"
    return slicing(run.method.name, run.method.parameters).sharing


def named(run: RunFile, text: str) -> SliceSpec:
    """The slice that a text means in a run, also by a model's name; raises `InputError` and `NoSuchNameError`."""
    if text in run.models:
        return SliceSpec(model=text)
    name = run.model.name if run.model is not None else ""
    spec = models.parse_slice(name, text, others=True)
    if spec.model and spec.model not in run.models and spec.model not in models.names():
        raise NoSuchNameError.of("model", spec.model, [*run.models, *models.names()])
    return spec


def rungs(run: RunFile) -> tuple[str, ...]:
    """The slices that devices of a run may train, the largest first; raises `InputError`."""
    method = run.method.name
    said, specs = slicing(method, run.method.parameters), [named(run, text) for text in run.slices]
    found = said.rungs([str(spec) for spec in specs], method)
    others = [spec.model for spec in specs if spec.model]
    if others and run.sharing == "position":
        raise InputError(
            f'sharing: "position" combines the parts of one model, and slices names the other model {others[0]!r}; '
            "leave sharing out: each architecture is then a model of its own"
        )
    if sharing(run) == "architecture" and not said.apart:
        raise InputError(
            f'sharing: {method!r} combines the slices of one model, got "architecture"; leave it out, '
            "or use fedavg, which trains each architecture by itself"
        )
    return found


def knowledge(name: str, parameters: Mapping[str, Any]) -> KnowledgeRules | None:
    """What devices of a run send beside weights; None: nothing. Raises as `validate` does."""
    said = [(_entry(part).knowledge, own) for part, own in _parse(name, parameters)]
    return next((rules(own) for rules, own in said if rules is not None), None)


def knowledge_limits(run: RunFile) -> Limits:
    """What a device of a run may send beside weights, at most."""
    rules = knowledge(run.method.name, run.method.parameters) or KnowledgeRules(kinds=(), max_bytes=0)
    return Limits(
        num_classes=len(run.classes),
        max_rows=rules.max_rows,
        max_bytes=rules.max_bytes,
        kinds=rules.kinds,
        min_count=MIN_COUNT_FLOOR,
        max_count=run.devices.max_samples * max(1, run.train.epochs),
    )


def trains_as(name: str) -> str:
    """The method whose devices do the same, so that their memory need not be measured twice; raises as `validate`."""
    return "+".join(part for part in _parts(name) if not _entry(part).as_plain) or _PLAIN


def has_global_model(name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether the server's model is one to use and to judge; otherwise the models live on the devices."""
    return all(_entry(part).has_global_model(parsed) for part, parsed in _parse(name, parameters))


def mixes_widths(run: RunFile) -> bool:
    """Whether devices of a run train slices of different width whose tensors are combined; raises as `rungs` does."""
    alone = sharing(run) == "architecture" or slicing(run.method.name, run.method.parameters).split
    shared = all(_entry(part).shares_weights for part in _parts(run.method.name))
    return shared and not alone and len({parse_slice(rung).width for rung in rungs(run)}) > 1


def usual_model(name: str) -> str:
    """A model to show the method with; raises as `validate` does."""
    usual = [_entry(part).shown_with for part in _parts(name)]
    return next((model for model in usual if model != _entry(_PLAIN).shown_with), usual[0])


def parameter_types(name: str) -> list[type]:
    """The records of a method's own parameters, one for each part of its name; raises as `validate` does."""
    return [_entry(part).parameters for part in _parts(name)]


def of_run(run: RunFile) -> Method:
    """The method of a run; raises as `validate` and `rungs` do."""
    together = rungs(run)
    if sharing(run) == "architecture":
        together = (WHOLE_MODEL,)  # each slice is a model of its own, and knows of no other
    return get(run.method.name, run.method.parameters, together)


def get(name: str, parameters: Mapping[str, Any], rungs: Sequence[str] = ()) -> Method:
    """The method with its parameters set, for these slices or its own; raises as `validate` does."""
    rungs = tuple(rungs) or slicing(name, parameters).ladder
    parts = _parse(name, parameters)
    if _entry(parts[-1][0]).over:
        parts = [*parts, (_PLAIN, FedAvgParameters())]
    *over, (under, parsed) = parts
    method = _load(under, parsed, rungs)
    for part, parsed in reversed(over):
        method = _load(part, parsed, rungs, method)
    return dataclasses.replace(method, name=name, plans=plan_rules(name, parameters))


def _load(part: str, parsed: Any, rungs: Sequence[str], *base: Method) -> Method:
    entry = _entry(part)
    return entry.load(parsed, *base, rungs=rungs) if entry.sized else entry.load(parsed, *base)


def _parse(name: str, parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each part of the name with its parameters."""
    parts = _parts(name)
    fields = {f.name: f for part in parts for f in dataclasses.fields(_entry(part).parameters)}
    record = _merged([_entry(part).parameters for part in parts])
    parameters = {key.replace("_", "-"): value for key, value in parameters.items()}  # as they stand in files
    for key, value in parameters.items():
        if not fields:
            raise InputError(f"method {name!r} has no parameters of its own, got {key} = {value!r}; remove it")
        try:
            parse_table(record, {key: value}, source=f"method {name!r}")
        except InputError as error:
            about = fields.get(key.replace("-", "_"))
            if about is None:
                raise
            if not about.metadata:  # of a method of one's own, which is in no paper yet
                raise InputError(str(error).removesuffix(" ()")) from None
            told = str(error).removesuffix(f" ({about.metadata['help']})")
            if told.endswith(f"got {type(value).__name__}"):  # of another type
                told += f" {value!r:.40}{_range(record, key)}"
            symbol = f"{about.metadata['symbol']} in the paper: " if about.metadata["symbol"] != "-" else ""
            raise InputError(f"{told}; {symbol}{about.metadata['help']}") from None
    parsed: Any = parse_table(record, parameters, source=f"method {name!r}")
    return [(part, _own(_entry(part).parameters, parsed)) for part in parts]


def _range(record: type, key: str) -> str:
    limits = next(row.range for row in describe(record) if row.key.replace("-", "_") == key.replace("-", "_"))
    return f" (range: {limits.replace('`', '')})" if limits else ""


def _parts(name: str) -> list[str]:
    """`fedepth+fedprox` as its parts, if they can be put over one another."""
    parts = name.split("+")
    if any(_find(part) is None for part in parts):
        raise NoSuchNameError.of("method", name, names())
    for part in parts[:-1]:
        if not _entry(part).over:
            able = ", ".join(sorted(known for known, entry in _METHODS.items() if entry.over))
            raise InputError(f"method {name!r}: {part!r} cannot be put over another; {able} can")
    if len(set(parts)) != len(parts) or sum(_decides(part) for part in parts) > 1:
        deciding = ", ".join(sorted(name for name in _METHODS if _decides(name)))
        raise InputError(f"method {name!r}: expected each part once and one of {deciding} at most; leave one out")
    for number, part in enumerate(parts):
        for above in parts[:number]:
            if above in _entry(part).refuses:
                why = _entry(part).refuses[above]
                raise InputError(f"method {name!r}: {part!r} cannot be under {above!r}: {why}; use one of them alone")
    return parts


def _decides(part: str) -> bool:
    """Whether a method says how the devices of a run train, whatever is under it."""
    return _entry(part).over and _entry(part).plans is not no_choice


def _merged(classes: Sequence[type]) -> type:
    """One record with the parameters of all parts; no two methods may call one by the same name."""
    if len(classes) == 1:
        return classes[0]
    merged: list[tuple[str, Any, Any]] = []
    for cls in classes:
        hints = typing.get_type_hints(cls, include_extras=True)
        for f in dataclasses.fields(cls):
            merged.append((f.name, hints[f.name], dataclasses.field(default=f.default, metadata=f.metadata)))
    return dataclasses.make_dataclass("Parameters", merged, frozen=True, kw_only=True)


def _own(cls: type, parsed: Any) -> Any:
    return cls(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(cls)})
