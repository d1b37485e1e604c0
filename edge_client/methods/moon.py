"""MOON. Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021.

FedAvg whose devices also pull the representation of each sample towards that of the received model, which has seen more
data, and away from that of their own model after their last round. Travels as FedAvg does; the last model stays on the
device.

    l = CE + mu l_con
    l_con = -log(near / (near + far)) = softplus((cos(z, z_prev) - cos(z, z_glob)) / tau)
        near = exp(cos(z, z_glob) / tau), far = exp(cos(z, z_prev) / tau)

z is the model's tap `features`. The received and the previous model run without gradient and in evaluation mode.

Deviations: there is no projection head, the representation is the input of the model's classifier. A device without a
previous model (its first round) minimises CE alone.

Legend: z, z_glob, z_prev = representations by the trained, the received and the previous model, tau = temperature.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from edge_client.errors import InputError, PayloadError
from edge_client.methods.base import Batch, Job, Method, Outcome, Phase, PlainClient, Term
from edge_client.methods.cards.moon import MoonParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.models.contract import Model
from edge_client.models.taps import tapped
from edge_client.training.objectives import cross_entropy

__all__ = ["MoonClient", "contrast", "method"]

_TAP = "features"


class MoonClient(PlainClient):
    """Cross entropy and the contrast of representations."""

    def __init__(self, parameters: MoonParameters) -> None:
        self._mu = parameters.mu
        self._temperature = parameters.temperature
        self._received_model: Model | None = None
        self._previous: Model | None = None

    def begin(self, job: Job) -> None:
        """Keep the received model, and take out the previous one, if there is one."""
        super().begin(job)
        _check(job.model)
        if self._mu > 0 and job.state:
            self._received_model, self._previous = _frozen_copy(job.model), _frozen_copy(job.model)
            for name, tensor in self._previous.state_dict().items():
                value = job.state.get(name)
                if value is None or value.shape != tensor.shape:
                    raise PayloadError("names", f"this device's previous model has no {name!r} {list(tensor.shape)}")
                tensor.copy_(value)

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """One term: both losses come from one pass."""
        if self._received_model is None or self._previous is None:
            yield from super().terms(batch, phase)
            return
        with torch.no_grad():
            z_received, _ = _represent(self._received_model, batch.x)
            z_previous, _ = _represent(self._previous, batch.x)
        z, logits = _represent(self.job.model, batch.x)
        each = cross_entropy(logits, batch.y) + self._mu * contrast(z, z_received, z_previous, self._temperature)
        del z, logits
        yield Term(name="cross_entropy+contrast", each=each)

    def end(self) -> Outcome:
        """The trained model is the previous one of the next time."""
        return Outcome(state=self.job.model.state_dict()) if self._mu > 0 else Outcome()


def contrast(z: Tensor, z_received: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """l_con of each sample: [b, F] three times -> [b]."""
    near = functional.cosine_similarity(z, z_received, dim=1)
    far = functional.cosine_similarity(z, z_previous, dim=1)
    return functional.softplus((far - near) / temperature)


def _represent(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features [b, F] and logits of one pass."""
    seen, logits = tapped(model, [_TAP], x)
    return seen[_TAP].flatten(1), logits


def _frozen_copy(model: Model) -> Model:
    frozen = copy.deepcopy(model)
    frozen.requires_grad_(False)
    frozen.eval()
    return frozen


def _check(model: Model) -> None:
    """Raise `InputError` for a model of one unit; a model without shapes has no taps yet, and is checked on devices."""
    if hasattr(model, "taps") and _TAP not in model.taps:
        raise InputError(
            "method 'moon' compares what the model's classifier gets, and this model is one unit; "
            "make it two or more (an nn.Sequential, or Task(units=[...])), or use fedprox"
        )


def method(parameters: MoonParameters) -> Method:
    """MOON, for the registry."""
    return Method(
        client=partial(MoonClient, parameters),
        server=CoverageServer(),
        check=_check,
    )
