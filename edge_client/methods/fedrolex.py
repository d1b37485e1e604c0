"""FedRolex. Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022.

As HeteroFL, each device trains the share r of the channels that it has memory for; but the window of channels moves by
one in every round, so that every part of the server's model is trained by devices of every size. Down and up: a slice
of the model.

    channels of a layer with K in round n (from 0):  n mod K, n + 1 mod K, ..., ceil(r K) of them

Deviations: the window moves forward, as the paper writes it (the authors' code moves it backward, which covers the
same). All tensors have the plain coverage mean; the code weights some by how often they were trained. What a method
keeps on a device (c_i of Scaffold, the previous model of MOON) belongs to a window, and is not used with another.

Legend: K = channels of a layer, n = round, r = share of the channels.
"""

from __future__ import annotations

from edge_client.methods.base import Method, PlainClient
from edge_client.methods.cards.fedrolex import FedRolexParameters
from edge_client.methods.fedavg import CoverageServer

__all__ = ["method"]


def method(parameters: FedRolexParameters) -> Method:
    """FedRolex, for the registry; which window a device gets is in `methods.slices`."""
    return Method(
        client=PlainClient,
        server=CoverageServer(uniform=parameters.uniform),
    )
