"""The card of Velo."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from edge_client.knowledge.schema import KnowledgeRules
from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards import felo
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.cards.felo import FeloParameters
from edge_client.methods.cards.inco import NOT_UNDER_INCO
from edge_client.records import Between

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class VeloParameters(FeloParameters):
    """Parameters of Velo: those of Felo, and of a conditional VAE on the server."""

    interval: Annotated[int, Between(1, 10**6)] = field(
        default=1, metadata={"symbol": "-", "help": "rounds from one training of the VAE to the next"}
    )
    vae_epochs: Annotated[int, Between(1, 10**4)] = field(
        default=10, metadata={"symbol": "E_v", "help": "passes over the pool in one training of the VAE"}
    )
    vae_lr: Annotated[float, Between(0, 10)] = field(
        default=1e-3, metadata={"symbol": "-", "help": "learning rate of the VAE (Adam)"}
    )
    vae_width: Annotated[int, Between(1, 4096)] = field(
        default=256, metadata={"symbol": "H, Z", "help": "hidden and latent width at most; features may be narrower"}
    )
    beta_kld: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "KLD", "help": "weight of the divergence of the latent from N(0, I)"}
    )
    pool: Annotated[int, Between(1, 10**6)] = field(
        default=5000, metadata={"symbol": "-", "help": "features that the server keeps of each class"}
    )


def _knowledge(parameters: VeloParameters) -> KnowledgeRules:
    """Felo's; the server trains its VAE beside the round."""
    return replace(felo.knowledge(parameters), studies=True)


def load(parameters: VeloParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.velo import method

    return method(parameters)


CARD = Card(
    name="velo",
    paper="Chan and Ngai, arXiv:2210.15527",
    parameters=VeloParameters,
    load=load,
    exchange=lambda parameters: Exchange(
        down="model, synthetic features and class means of logits", up="model, its own class means"
    ),
    slicing=felo.slicing,
    knowledge=_knowledge,
    refuses=NOT_IN_GROUPS | NOT_UNDER_INCO,
)
