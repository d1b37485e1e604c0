"""Cost rows from shapes alone: a looser bound, for a model that was measured nowhere and cannot be measured here.

Every layer's output is taken to be kept, and as much again to be needed in backward.
"""

from __future__ import annotations

import math

from torch import nn

from edge_client.models.contract import Model, Unit
from edge_client.planning.rows import Line, ModelRows, UnitRow

__all__ = ["rows_from_shapes"]

_FLOAT = 4
_HIDDEN_BYTES = 4 * 2**20
_SECONDS_PER_BYTE = 1e-9  # only ratios count


def rows_from_shapes(model: Model, *, channels_last: bool) -> ModelRows:
    """Rows without any measurement; nothing is recomputed in them."""
    held = 0.0
    rows = []
    head = model.units[-1]
    for number, unit in enumerate(model.units):
        before = held
        held += _FLOAT * (unit.num_activations + (math.prod(unit.in_shape) if number == 0 else 0))
        rows.append(_row(model, unit, head, before, held))
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    return ModelRows(
        key="0" * 64,
        torch="",
        machine="",
        channels_last=channels_last,
        batches=(1, 2),
        base_bytes=0,
        model_bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
        hidden_bytes=_HIDDEN_BYTES,
        has_batchnorm=bool(norms),
        has_batch_statistics=any(not norm.track_running_stats for norm in norms),
        min_batch=model.min_batch,
        modes={"plain": tuple(rows)},
    )


def _row(model: Model, unit: Unit, head: Unit, before: float, held: float) -> UnitRow:
    sizes = [param.nbytes for param in (model.get_parameter(name) for name in unit.parameters) if param.requires_grad]
    heads = [model.get_parameter(name).nbytes for name in head.parameters]
    inside, input_bytes = float(held - before), float(_FLOAT * math.prod(unit.in_shape))
    out = _FLOAT * math.prod(unit.out_shape)
    worst: Line = (2 * inside + input_bytes + out, 2.0 * sum(sizes))
    behind: Line = (4.0 * _FLOAT * head.num_activations + 2 * out, 2.0 * sum(heads))
    return UnitRow(
        name=unit.name,
        kind=unit.kind,
        parameter_bytes=sum(sizes),
        largest_bytes=max(sizes, default=0),
        out_bytes=out,
        held=(held, 0.0),
        forward=((inside + input_bytes + out, 0.0),),
        backward=(worst,),
        adding=(worst,),
        evaluate=((inside + input_bytes + out, 0.0),),
        forward_s=(inside * _SECONDS_PER_BYTE, 0.0),
        backward_s=(2 * inside * _SECONDS_PER_BYTE, 0.0),
        alone_held=(input_bytes + inside, 0.0),
        alone_forward=((input_bytes + inside + out, 0.0),),
        alone_backward=((input_bytes + worst[0], worst[1]),),
        alone_adding=((input_bytes + worst[0], worst[1]),),
        head_forward=((behind[0], 0.0),),
        head_backward=(behind,),
        head_adding=(behind,),
        hidden_bytes=_HIDDEN_BYTES,
    )
