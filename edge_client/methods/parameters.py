"""The parameters of every method: type, range, default, the paper's symbol. Free of torch: the coordinator checks runs.

A field's metadata: `symbol` (as the paper writes it) and `help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from edge_client.records import Between, Matches

__all__ = [
    "KEPT_ANCHOR_BYTES",
    "DraftFedParameters",
    "FeDepthParameters",
    "FedAvgParameters",
    "FedGktParameters",
    "FedHeParameters",
    "FedInParameters",
    "FedMdParameters",
    "FedNovaParameters",
    "FedPerParameters",
    "FedProtoParameters",
    "FedProxParameters",
    "FedRolexParameters",
    "FeloParameters",
    "HeteroFLParameters",
    "InCoParameters",
    "InclusiveFLParameters",
    "LocalParameters",
    "MoonParameters",
    "ScaffoldParameters",
    "ScaleFLParameters",
    "SplitMixParameters",
    "VeloParameters",
]

KEPT_ANCHOR_BYTES = 2**17  # at most: FedProx's anchors of small parameters, which a device keeps while it trains


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgParameters:
    """FedAvg has none of its own: batch, epochs and learning rate (B, E, eta) belong to the run's `train`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProxParameters:
    """FedProx."""

    mu: Annotated[float, Between(0, 1000)] = field(
        default=0.01,
        metadata={"symbol": "mu", "help": "weight of the proximal term (mu/2)||w - w_t||^2, equation 2; 0 is FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldParameters:
    """Scaffold."""

    correction: bool = field(
        default=True,
        metadata={"symbol": "c - c_i", "help": "correct each local step by the control variates; false is FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedNovaParameters:
    """FedNova has none of its own: tau_i are the steps that a device made, rho is the run's `train.momentum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonParameters:
    """MOON."""

    mu: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "mu", "help": "weight of the contrastive loss; 0 is FedAvg"}
    )
    temperature: Annotated[float, Between(0.001, 1000)] = field(
        default=0.5, metadata={"symbol": "tau", "help": "divides the cosines in the contrastive loss"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroFLParameters:
    """HeteroFL."""

    scaler: bool = field(
        default=True,
        metadata={
            "symbol": "1/r",
            "help": "divide what layers put out by their share r of the channels while training, in a model without "
            "normalisation: with one the factor has no effect",
        },
    )
    mask: bool = field(
        default=False,
        metadata={
            "symbol": "masked cross-entropy",
            "help": "logits of classes that a device has not are 0 in its loss, and it has no say in their rows of the "
            "output layer; tells the server which classes a device has, unless its owner says share.class-statistics = "
            "false: that one has no mask",
        },
    )
    redraw: bool = field(
        default=False,
        metadata={
            "symbol": "dynamic",
            "help": "each device draws one of the slices that it has memory for in every round; false: the largest",
        },
    )
    uniform: bool = field(
        default=True,
        metadata={"symbol": "1/m", "help": "all devices count the same; false: by their samples, as in FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedRolexParameters:
    """FedRolex."""

    roll: bool = field(
        default=True,
        metadata={
            "symbol": "n mod K",
            "help": "the window of channels moves by one in every round; false: it stays, which is HeteroFL's",
        },
    )
    uniform: bool = field(
        default=True,
        metadata={"symbol": "p_n", "help": "all devices count the same; false: by their samples, as in FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InclusiveFLParameters:
    """InclusiveFL."""

    momentum: Annotated[float, Between(0, 1)] = field(
        default=0.2,
        metadata={
            "symbol": "beta",
            "help": "share of the larger model's mean update in that of a smaller one's top block; 0: none",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFLParameters:
    """ScaleFL."""

    gamma: Annotated[float, Between(0, 1000)] = field(
        default=0.0,
        metadata={
            "symbol": "gamma",
            "help": "weight of the distillation from a device's last exit to its earlier ones; 0, as in the authors' "
            "code by default: none",
        },
    )
    temperature: Annotated[float, Between(0.001, 1000)] = field(
        default=3.0, metadata={"symbol": "tau", "help": "divides the logits in the distillation"}
    )
    warm_up: Annotated[float, Between(0, 1)] = field(
        default=0.25, metadata={"symbol": "0.25 T", "help": "part of the run's rounds before the distillation begins"}
    )
    uniform: bool = field(
        default=True,
        metadata={"symbol": "1/m", "help": "all devices count the same; false: by their samples, as in FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMixParameters:
    """SplitMix."""

    bases: Annotated[int, Between(1, 64)] = field(
        default=8,
        metadata={
            "symbol": "1/r",
            "help": "base networks that the model is split into, each with that share of the channels; 1 is FedAvg",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedPerParameters:
    """FedPer."""

    personal: Annotated[int, Between(0, 1000)] = field(
        default=1,
        metadata={"symbol": "K_P", "help": "last units with parameters that never leave a device; 0 is FedAvg"},
    )
    match: Annotated[str, Matches("prefix|name_shape")] = field(
        default="prefix",
        metadata={
            "symbol": "K_B",
            "help": "what slices of different sizes share: prefix: their first units, as long as they are the same; "
            "name_shape: every tensor that has one name and shape",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameters:
    """Training alone has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeDepthParameters:
    """FeDepth and m-FeDepth."""

    budget_mode: Annotated[str, Matches("per_group|split")] = field(
        default="per_group",
        metadata={
            "symbol": "problem (1)",
            "help": "per_group: each group is trained for train.epochs; split: the groups share them",
        },
    )
    partial: bool = field(
        default=True,
        metadata={
            "symbol": "partial training",
            "help": "the first blocks may stay untrained on a device that cannot train them even one by one",
        },
    )
    averaging: Annotated[str, Matches("masked|plain")] = field(
        default="masked",
        metadata={
            "symbol": "p_k",
            "help": "masked: a tensor's mean is over the devices that trained it; plain: over all, trained or not",
        },
    )
    bypass: bool = field(
        default=False,
        metadata={
            "symbol": "partial training",
            "help": "jump over untrained blocks instead of running them; what they take and give must have one shape",
        },
    )
    mutual: Annotated[int, Between(1, 8)] = field(
        default=1,
        metadata={"symbol": "M", "help": "models at most that a device with surplus memory trains side by side"},
    )
    cost: Annotated[str, Matches("measured|table-1")] = field(
        default="measured",
        metadata={
            "symbol": "Table 1",
            "help": "what a group takes: measured, or by the authors' own rule, to compare results with theirs",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FeloParameters:
    """Felo."""

    alpha: Annotated[float, Between(0, 1000)] = field(
        default=0.5,
        metadata={"symbol": "alpha", "help": "weight of the distance to class means; 0 is same-architecture FedAvg"},
    )
    kl_reduction: Annotated[str, Matches("batchmean|mean")] = field(
        default="batchmean",
        metadata={"symbol": "KL", "help": "batchmean: sum over classes; mean: their mean, as in the released code"},
    )
    weighting: Annotated[str, Matches("uniform|count")] = field(
        default="uniform",
        metadata={"symbol": "mean", "help": "each device counts once in a class mean, or as its samples are many"},
    )
    max_age: Annotated[int, Between(0, 10**6)] = field(
        default=0,
        metadata={"symbol": "-", "help": "rounds for which what a device said of a class stays; 0: for ever"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VeloParameters(FeloParameters):
    """Velo: Felo, and a conditional VAE on the server."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FedHeParameters:
    """FedHe."""

    alpha: Annotated[float, Between(0, 1000)] = field(
        default=0.5, metadata={"symbol": "alpha", "help": "weight of the distance to class means of logits; 0: alone"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProtoParameters:
    """FedProto."""

    ld: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "lambda", "help": "weight of the distance to prototypes; 0: alone"}
    )
    inference: Annotated[str, Matches("prototype|classifier")] = field(
        default="prototype",
        metadata={"symbol": "-", "help": "who answers on a device: the nearest prototype, or the model's classifier"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedInParameters:
    """FedIN."""

    mu: Annotated[float, Between(0, 1000)] = field(
        default=0.1, metadata={"symbol": "mu", "help": "weight of the proximal term (mu/2)||w - w_t||^2; 0: without"}
    )
    alleviation: Annotated[str, Matches("weighted|projection|sequential")] = field(
        default="weighted",
        metadata={
            "symbol": "Eq. 13, 14",
            "help": "how the two gradients meet: their sum (14), a projection (13), or one step after the other",
        },
    )
    rescale_outer: bool = field(
        default=False,
        metadata={"symbol": "lambda", "help": "weighted: extractor and classifier get their whole gradient, not half"},
    )
    pairs: Annotated[int, Between(0, 4096)] = field(
        default=16, metadata={"symbol": "S", "help": "feature pairs up and down; 0: without them, which is FedProx"}
    )
    pool_batches: Annotated[int, Between(1, 10**4)] = field(
        default=20, metadata={"symbol": "-", "help": "uploads of pairs of one signature that the server keeps"}
    )
    uniform: bool = field(
        default=False,
        metadata={"symbol": "Eq. 2", "help": "all devices count the same in a layer's mean; false: by their samples"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedMdParameters:
    """FedMD."""

    public: Annotated[str, Matches(r"(?s).{0,2000}")] = field(
        default="", metadata={"symbol": "D_0", "help": "the shared samples, on the server: SOURCE:PATH"}
    )
    public_samples: Annotated[int, Between(1, 10**6)] = field(
        default=1000, metadata={"symbol": "D_0", "help": "how many of them, drawn once; devices keep them"}
    )
    samples: Annotated[int, Between(0, 10**6)] = field(
        default=0, metadata={"symbol": "N_a", "help": "shared samples of one round, in turn; 0: all"}
    )
    digest_epochs: Annotated[int, Between(0, 1000)] = field(
        default=1, metadata={"symbol": "digest", "help": "passes towards the consensus; 0: alone"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFedParameters:
    """DraftFed."""

    public: Annotated[str, Matches(r"(?s).{0,2000}")] = field(
        default="", metadata={"symbol": "G", "help": "the shared samples, on the server: SOURCE:PATH"}
    )
    public_samples: Annotated[int, Between(1, 10**6)] = field(
        default=512, metadata={"symbol": "G", "help": "how many of them, drawn once; devices keep them"}
    )
    draft_batch: Annotated[int, Between(0, 10**6)] = field(
        default=128, metadata={"symbol": "-", "help": "shared samples of one round, in turn; 0: all"}
    )
    lambda1: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "lambda_1", "help": "weight of the first convolution's draft"}
    )
    lambda2: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "lambda_2", "help": "weight of the last convolution's draft"}
    )
    lambda3: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "lambda_3", "help": "weight of the logits' draft"}
    )
    draft_epochs: Annotated[int, Between(0, 1000)] = field(
        default=1, metadata={"symbol": "-", "help": "passes towards the targets; 0: alone"}
    )
    mask_padding: bool = field(
        default=False,
        metadata={"symbol": "Eq. 7", "help": "average each channel over the models that have it, without zeros"},
    )
    warmup_rounds: Annotated[int, Between(0, 10**6)] = field(
        default=1, metadata={"symbol": "-", "help": "first rounds whose drafts nobody learns from"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedGktParameters:
    """FedGKT."""

    alpha: Annotated[float, Between(0, 1000)] = field(
        default=0.5, metadata={"symbol": "alpha", "help": "weight of the distillation, on both sides; 0: without"}
    )
    temperature: Annotated[float, Between(0.001, 1000)] = field(
        default=3.0, metadata={"symbol": "T", "help": "divides logits in the distillation"}
    )
    server_epochs: Annotated[int, Between(1, 1000)] = field(
        default=1, metadata={"symbol": "E_s", "help": "passes of the server over all received features"}
    )
    server_lr: Annotated[float, Between(0, 10)] = field(
        default=1e-3, metadata={"symbol": "-", "help": "learning rate of the server's part (Adam)"}
    )
    max_bytes: Annotated[int, Between(1, 2**40)] = field(
        default=16 * 2**20,
        metadata={"symbol": "-", "help": "features, logits and labels that a device sends in a round, in bytes"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InCoParameters:
    """InCo."""

    rule: Annotated[str, Matches("released|theorem|text|no_opt|no_norm|sum|off")] = field(
        default="released",
        metadata={
            "symbol": "theta",
            "help": "how a stage's first layer changes the later ones: the authors' code, Theorem 3.1, the paper's "
            "text, three ablations; off: not at all",
        },
    )
    granularity: Annotated[str, Matches("kernel|tensor")] = field(
        default="kernel",
        metadata={"symbol": "g_k", "help": "what has one theta: each kernel of a convolution, or the whole tensor"},
    )
    theta_max: Annotated[float, Between(0, 1000)] = field(
        default=5.0, metadata={"symbol": "theta", "help": "largest theta of released and no_norm"}
    )
    clip: Annotated[float, Between(0, 1000)] = field(
        default=0.1,
        metadata={"symbol": "g_k", "help": "largest element of a changed update; 0: no such limit"},
    )
    weights: Annotated[str, Matches("samples|uniform")] = field(
        default="samples",
        metadata={
            "symbol": "Algorithm 1",
            "help": "samples: devices count as in the method underneath; uniform: each the same, as in the authors' "
            "code",
        },
    )
    server_lr: Annotated[float, Between(0, 1000)] = field(
        default=1.0,
        metadata={"symbol": "g", "help": "multiplies the mean step of all parameters before the rule"},
    )
