"""Which knowledge may leave a device, by the rules that its owner wrote into `share` of device.toml.

    class means          share.class-statistics; only of classes with min-count samples or more (10 at least, whatever
                         is written); each sample clipped to share.clip; Gaussian noise of share.noise
    which classes exist  the same: HeteroFL's mask reveals them
    features of samples  share.features: pairs and maps are made of single samples of this device's data
    outputs for shared   share.drafts: drafts and logits for samples that the coordinator sent; they reveal what the
    samples              model has learnt here, also about single samples (membership)

Noise. A mean of n samples, each of length `clip` at most, moves by 2 clip / n at most when one of them is replaced by
another of its class, for a given model that looks at each sample by itself. Noise of standard deviation
noise x 2 clip / n on every number of it costs rho = 1 / (2 noise^2) of zero-concentrated differential privacy (Bun and
Steinke, 2016); costs of tables and of rounds add up, and amount to

    epsilon = rho + 2 sqrt(rho ln(1 / delta)),  delta = 1e-5

Every release is written into the device's ledger before the update exists: what was never sent may be counted, what was
sent is never missing. When the next release would cost more than share.epsilon in all, the device declines.
What is not counted: the model was trained on the same samples, so that a sample also moves the features of the others,
and in a batch with BatchNorm directly. The sum is that of the means given the model; it does not bound everything that
the update reveals.
Without noise nothing here is differentially private, and no message claims so: a bound on the number of samples and on
their length makes single samples harder to see, not impossible. Labels and counts of classes are not protected, and the
generator's floating-point numbers are not those of a hardened sampler.
No run can widen what the owner allows.
Covers: knowledge. Does not cover: weights, which methods that share them send as they are.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from edge_client import durable
from edge_client.config.device_file import ShareSection
from edge_client.errors import MachineError
from edge_client.knowledge.kinds import ClassTable, Knowledge
from edge_client.knowledge.schema import CLASS_KINDS, MIN_COUNT_FLOOR

__all__ = ["DELTA", "Gate", "Ledger", "Refusal", "Release", "epsilon_of", "fresh_noise"]

DELTA = 1e-5
_PERMISSIONS = {
    "class/feature": ("class_statistics", "class means"),
    "class/logit": ("class_statistics", "class means"),
    "pairs": ("features", "features of single samples"),
    "maps": ("features", "features of single samples"),
    "drafts": ("drafts", "its model's outputs for shared samples"),
    "logits": ("drafts", "its model's outputs for shared samples"),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a device does not take part; `code` is short and stable."""

    code: str  # not_shared | privacy_budget
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One line of the ledger: noisy class means of a round."""

    run: str
    round: int
    tables: int
    noise: float
    clip: float
    least: int  # samples behind the smallest class
    rho: float


def epsilon_of(rho: float, delta: float = DELTA) -> float:
    """The epsilon of (epsilon, delta)-differential privacy that a cost in zCDP amounts to."""
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


class Ledger:
    """The noisy releases of this device so far: a file with a line for each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def releases(self) -> list[Release]:
        """Every release; raises `MachineError` if the file is damaged: then nothing may be released."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
            return [Release(**json.loads(line)) for line in lines]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise MachineError(f"cannot read the privacy ledger {self._path}: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise MachineError(
                f"the privacy ledger {self._path} is damaged; it says what was spent, so nothing is released without it"
            ) from error

    def spent(self) -> float:
        """The sum of rho over all releases."""
        return math.fsum(release.rho for release in self.releases())

    def add(self, release: Release) -> None:
        """Append a release, durably."""
        lines = [json.dumps(asdict(entry), sort_keys=True) for entry in (*self.releases(), release)]
        durable.write_bytes(self._path, ("\n".join(lines) + "\n").encode(), point="worker.ledger")


def fresh_noise() -> torch.Generator:
    """A generator that nobody else can seed: a run's seed is known to the coordinator."""
    return torch.Generator().manual_seed(secrets.randbits(63))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Lets knowledge out by the owner's rules, and keeps the ledger."""

    share: ShareSection
    ledger: Ledger

    @property
    def min_count(self) -> int:
        """Samples that a class needs before its mean may leave."""
        return max(MIN_COUNT_FLOOR, self.share.min_count)

    @property
    def class_min_count(self) -> int | None:
        """Samples that a class needs before its presence may be revealed; None: it never is."""
        return self.min_count if self.share.class_statistics else None

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of what a sample adds to a class mean; None: no limit."""
        return self.share.clip if self.share.clip > 0 else None

    @property
    def rho(self) -> float:
        """The cost of one noisy table; 0 without noise."""
        return 1 / (2 * self.share.noise**2) if self.share.noise > 0 else 0.0

    def describe(self) -> str:
        """How class means are protected, in words; means without noise are not called private."""
        clipped = f"clipped to {self.share.clip:g}" if self.share.clip > 0 else "not clipped"
        if self.share.noise == 0:
            return f"means of {self.min_count} samples or more, {clipped}, no noise: not differentially private"
        spent = epsilon_of(self.ledger.spent())
        return (
            f"means of {self.min_count} samples or more, {clipped}, noise {self.share.noise:g}: "
            f"epsilon {spent:.3g} of {self.share.epsilon:g} spent (delta {DELTA:g})"
        )

    def refusal(self, kinds: Collection[str]) -> Refusal | None:
        """Why this device takes no part in a method that sends these kinds; asked before anything is trained."""
        for kind in sorted(kinds):
            key, content = _PERMISSIONS[kind]
            if not getattr(self.share, key):
                name = f"share.{key.replace('_', '-')}"
                return Refusal("not_shared", f"this device's owner keeps {content} ({name} = false in device.toml)")
        return self._over_budget(len(set(CLASS_KINDS) & set(kinds)))

    def _over_budget(self, tables: int) -> Refusal | None:
        if self.rho == 0 or self.share.epsilon == 0 or tables == 0:
            return None
        epsilon = epsilon_of(self.ledger.spent() + tables * self.rho)
        if epsilon <= self.share.epsilon:
            return None
        return Refusal(
            "privacy_budget",
            f"one more release would make epsilon {epsilon:.3g}, this device's owner allows {self.share.epsilon:g} in "
            "all (share.epsilon in device.toml)",
        )

    def release(
        self, items: Iterable[Knowledge], *, run: str, round: int, noise: torch.Generator
    ) -> tuple[Knowledge, ...]:
        """The items that may leave, noisy where the owner wants it; writes the ledger before it returns."""
        allowed = [item for item in items if getattr(self.share, _PERMISSIONS[item.kind][0])]
        tables = [self._large_enough(item) for item in allowed if isinstance(item, ClassTable)]
        others = [item for item in allowed if not isinstance(item, ClassTable)]
        released = [table for table in tables if table is not None]
        if self._over_budget(len(released)) is not None:
            released = []
        return (*self._noisy(released, run, round, noise), *others)

    def _large_enough(self, table: ClassTable) -> ClassTable | None:
        return table.only(table.counts >= self.min_count)

    def _noisy(self, tables: Sequence[ClassTable], run: str, round: int, noise: torch.Generator) -> list[ClassTable]:
        if self.share.noise == 0 or not tables:
            return list(tables)
        least = min(int(table.counts[table.classes].min()) for table in tables)
        release = Release(
            run=run,
            round=round,
            tables=len(tables),
            noise=self.share.noise,
            clip=self.share.clip,
            least=least,
            rho=len(tables) * self.rho,
        )
        self.ledger.add(release)
        return [self._with_noise(table, noise) for table in tables]

    def _with_noise(self, table: ClassTable, noise: torch.Generator) -> ClassTable:
        counts = table.counts[table.classes].double()[:, None]
        deviation = self.share.noise * 2 * self.share.clip / counts
        noise_values = torch.randn(table.values.shape, generator=noise, dtype=torch.float64)
        values = (table.values.double() + deviation * noise_values).float()
        return ClassTable(label=table.label, counts=table.counts, values=values)
