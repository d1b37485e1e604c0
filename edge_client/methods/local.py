"""Local: each device trains alone. The reference that every personalised method must beat; no paper.

FedPer with everything personal: all devices begin with the run's first model, and nothing of what they learn leaves
them but the results on their own test data. Down: the first model, once; later versions have the same bytes, which a
device does not fetch again. Up: no tensors. On the device: the model and the state of its optimizer.
"""

from __future__ import annotations

from functools import partial

from edge_client.methods.base import Method, Travel
from edge_client.methods.cards.local import LocalParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.fedper import PersonalClient, everything
from edge_client.models.contract import Model
from edge_client.wire.container import MODEL_PREFIX

__all__ = ["keep_the_model", "method"]


def keep_the_model(model: Model) -> tuple[str, ...]:
    """No tensor of the model leaves a device."""
    return (MODEL_PREFIX,)


def method(parameters: LocalParameters) -> Method:
    """Training alone, for the registry."""
    return Method(
        client=partial(PersonalClient, everything),
        server=CoverageServer(),
        travel=Travel(never_returned=keep_the_model),
    )
