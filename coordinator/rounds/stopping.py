"""When a run ends, which version is best, and how the learning rate goes: pure functions of a run file and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping

from coordinator.rounds.evaluation import FleetResult
from edge_client.config.run_file import RunFile, StopSection, TrainSection

__all__ = ["Scoreboard", "learning_rate", "score_of"]


def learning_rate(train: TrainSection, round_: int, num_rounds: int) -> float:
    """The rate of round 1 is `train.lr` under every schedule; cosine would reach 0 in the round after the last."""
    kind, _, factor = train.schedule.partition(":")
    if kind == "cosine":
        return train.lr * 0.5 * (1 + math.cos(math.pi * (round_ - 1) / num_rounds))
    if kind == "exponential":
        return float(train.lr * float(factor) ** (round_ - 1))
    return train.lr


def score_of(result: FleetResult, metric: str) -> float:
    """The value of the run's metric, as people know it."""
    return float(getattr(result, metric.replace("-", "_")))


class Scoreboard:
    """The scores of a run's versions, and what its rules make of them."""

    def __init__(self, file: RunFile, scores: Mapping[int, float]) -> None:
        self._rules: StopSection = file.stop
        self._every = file.evaluate.every
        self.best_version: int | None = None
        self._best = math.nan
        self._last_scored = -1
        self._since_best = 0  # evaluations that brought nothing better
        for version, score in scores.items():
            self.add(version, score)

    def add(self, version: int, score: float) -> None:
        """A version was judged; one that was judged before (a round that is tried again) counts once."""
        if version <= self._last_scored:
            return
        self._last_scored = version
        if self.best_version is None or self._is_better(score, self._best):
            self.best_version, self._best, self._since_best = version, score, 0
        else:
            self._since_best += 1

    def skip(self, version: int) -> None:
        """There was nothing to judge a version on."""
        self._last_scored = max(version, self._last_scored)

    def is_scored(self, version: int) -> bool:
        """Whether this version, or a later one, was judged, as far as it could be."""
        return version <= self._last_scored

    def is_due(self, version: int) -> bool:
        """Whether a version that is not the last one is judged."""
        return self._every > 0 and version % self._every == 0

    def end(self, version: int, elapsed_s: float) -> str:
        """Why the run ends with this version; empty if it goes on. The first rule that holds is named."""
        rules, metric = self._rules, self._rules.metric
        if rules.target is not None and self.best_version is not None and self._reaches(rules.target):
            return f"target reached: {metric} {self._best:.4g} at version {self.best_version}"
        if rules.patience is not None and self._since_best >= rules.patience:
            return (
                f"no better {metric} in {self._since_best} evaluations; "
                f"the best is {self._best:.4g} at version {self.best_version}"
            )
        if version >= rules.rounds:
            return f"{version} rounds"
        if rules.hours is not None and elapsed_s >= 3600 * rules.hours:
            return f"{rules.hours:g} hours are over after {version} rounds"
        return ""

    def _is_better(self, a: float, b: float) -> bool:
        return a < b if self._rules.metric == "loss" else a > b

    def _reaches(self, target: float) -> bool:
        return self._best <= target if self._rules.metric == "loss" else self._best >= target
