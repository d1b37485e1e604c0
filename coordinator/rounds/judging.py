"""Which versions are judged, who judges them, and the scores that result.

Covers: evaluation on devices and on the server. Does not cover: the arithmetic (`evaluation`), what a score leads to
(`stopping`, `ending`).
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.rounds import evaluation
from coordinator.rounds.instructions import Judge, SaveScore
from coordinator.rounds.stopping import Scoreboard, score_of
from coordinator.store.rows import EvaluationRow
from edge_client.config.run_file import RunFile

__all__ = ["Judging"]


class Judging:
    """The evaluations of one run."""

    def __init__(self, file: RunFile, scores: Scoreboard, *, dry: bool, awaits_sums: bool = False) -> None:
        self._file = file
        self._scores = scores
        self._dry = dry
        self.awaits_sums = awaits_sums  # of the devices' inputs: the first model is not complete, and nobody judges it
        self._asked_server = False

    @property
    def is_under_way(self) -> bool:
        """Whether the server is judging a version."""
        return self._asked_server

    def is_wanted(self, version: int, *, is_last: bool) -> bool:
        """Whether a version is to be judged; the last one always is, unless nothing is judged at all."""
        if self._dry or self.awaits_sums or self._file.evaluate.every == 0:
            return False
        return self._scores.is_due(version) or is_last

    def is_wanted_of_devices(self, version: int, *, is_last: bool) -> bool:
        """Whether the devices judge a version."""
        return self._file.evaluate.on == "devices" and self.is_wanted(version, is_last=is_last)

    def is_settled(self, version: int, *, is_last: bool) -> bool:
        """Whether nothing is left to judge of a version."""
        return self._scores.is_scored(version) or not self.is_wanted(version, is_last=is_last)

    def ask_server(self, version: int, *, is_last: bool) -> list[Judge]:
        """Let the server judge a version, if it should and has not."""
        on_server = self._file.evaluate.on != "devices"
        if not on_server or self._asked_server or self.is_settled(version, is_last=is_last):
            return []
        self._asked_server = True
        return [Judge(version)]

    def answered(self, version: int, rows: Sequence[EvaluationRow]) -> list[SaveScore] | None:
        """The score of the server's answer; None if nobody waits for it."""
        if not self._asked_server or any(row.version != version for row in rows):
            return None
        self._asked_server = False
        saved = self.score(version, rows)
        self._scores.skip(version)
        return saved

    def score(self, version: int, rows: Sequence[EvaluationRow]) -> list[SaveScore]:
        """The score of a version, unless it has one or nobody evaluated it on any sample."""
        result = evaluation.summarize(version, rows, len(self._file.classes))
        if result is None or self._scores.is_scored(version):
            return []
        score = score_of(result, self._file.stop.metric)
        self._scores.add(version, score)
        assert self._scores.best_version is not None
        return [SaveScore(version, score, self._scores.best_version)]
