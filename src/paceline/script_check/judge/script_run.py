"""A recorded run of a script as the judge sees it: the steps that all ranks have, with the lines of all ranks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.script_check.recording import ForwardCall, RankRecording, StepLine, TensorPrint, read_rank_recordings

Vector = NDArray[np.float64]
_MIN_SHARE = 1e-4  # of the largest own gradient, for a parameter whose reduction is judged


@dataclass(frozen=True)
class ScriptStep:
    """A step of one optimizer on all ranks."""

    ranks: tuple[StepLine, ...]

    @property
    def number(self) -> int:
        """The number of the step; 0 is before the first one."""
        return self.ranks[0].step

    @property
    def optimizer(self) -> int:
        """The number of the optimizer."""
        return self.ranks[0].optimizer

    def samples(self, rank: int) -> Counter[tuple[str, int]]:
        """Return how often a rank gave each sample to a model."""
        return Counter((call.module, key) for call in self._calls(rank) for key in call.samples)

    def num_samples(self, rank: int) -> int:
        """Return how many samples a rank gave to its models."""
        return sum(call.num_samples for call in self._calls(rank))

    def _calls(self, rank: int) -> list[ForwardCall]:
        return [call for call in self.ranks[rank].calls if call.has_parameters]

    def line(self, kind: str) -> str:
        """Return the user's line that called `forward`, `backward` or `step`."""
        if kind == "forward":
            return next((call.line for rank in self.ranks for call in rank.calls), "")
        return self.ranks[0].lines.get(kind, "")

    def own(self, name: str) -> Vector:
        """Return the sum of a parameter's own gradients over the backward passes: a column for each rank."""
        return np.array([np.sum(rank.own_gradients[name], axis=0) for rank in self.ranks]).T

    def passes(self, name: str) -> Vector:
        """Return a parameter's own gradients: a column for each pass of each rank, the ranks one after another."""
        return np.array([each for rank in self.ranks for each in rank.own_gradients[name]]).T

    @cached_property
    def gradients(self) -> tuple[Mapping[str, TensorPrint], ...]:
        """The gradients with which each rank stepped, whole; the parts of a sharded one are added."""
        return tuple(self._whole([rank.gradients for rank in self.ranks]))

    @cached_property
    def weights(self) -> tuple[Mapping[str, TensorPrint], ...]:
        """The weights of each rank after the step, whole."""
        return tuple(self._whole([rank.weights for rank in self.ranks]))

    @staticmethod
    def _whole(prints: Sequence[Mapping[str, TensorPrint]]) -> list[dict[str, TensorPrint]]:
        names = {name for of_rank in prints for name in of_rank}
        whole = [dict(of_rank) for of_rank in prints]
        for name in names:
            parts = [of_rank[name] for of_rank in prints if name in of_rank]
            if any(part.part is not None for part in parts):
                joined = join_parts(parts)
                for of_rank in whole:
                    of_rank[name] = joined
        return whole

    @cached_property
    def judged_names(self) -> list[str]:
        """The parameters whose reduction can be judged: all ranks have an own gradient that is no rounding."""
        names = [
            name
            for name in self.gradients[0]
            if all(name in rank.own_gradients for rank in self.ranks)
            and all(name in gradients for gradients in self.gradients)
        ]
        sizes = {name: float(np.linalg.norm(self.own(name))) / self.gradients[0][name].numel ** 0.5 for name in names}
        largest = max(sizes.values(), default=0.0)
        return [name for name in names if np.isfinite(sizes[name]) and sizes[name] >= _MIN_SHARE * largest]


def join_parts(parts: Sequence[TensorPrint]) -> TensorPrint:
    """Return the summary of a tensor from those of its parts; a part that several ranks have counts once."""
    distinct = list({part.part: part for part in parts}.values())
    projections = np.sum([part.projections for part in distinct], axis=0)
    return TensorPrint(
        numel=distinct[0].numel,
        norm=float(np.sqrt(sum(part.norm**2 for part in distinct))),
        largest=max(part.largest for part in distinct),
        projections=tuple(float(value) for value in projections),
        digest=sum(part.digest for part in distinct) % (1 << 64),
        faint_share=sum(part.faint_share for part in distinct),
    )


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """A recorded run. `steps` are in the order in which rank 0 made them, without those before the first step."""

    ranks: tuple[RankRecording, ...]
    start: tuple[ScriptStep, ...]
    steps: tuple[ScriptStep, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote a recording."""
        return len(self.ranks)

    @property
    def last_step(self) -> int:
        """The number of the last step that all ranks have."""
        return max((step.number for step in self.steps), default=0)

    @property
    def sharding(self) -> str:
        """The way in which weights are split; see `StepLine.sharding`."""
        return next((rank.sharding for step in self.steps for rank in step.ranks if rank.sharding), "")


def read_script_run(folder: Path) -> ScriptRun:
    """Read a recorded run.

    Raises:
        UsageError: a file can't be read.
    """
    ranks = read_rank_recordings(folder)
    by_key: dict[tuple[int, int], list[StepLine]] = {}
    for recording in ranks:
        for line in recording.steps:
            by_key.setdefault((line.optimizer, line.step), []).append(line)
    complete = [ScriptStep(tuple(lines)) for lines in by_key.values() if len(lines) == len(ranks)]
    return ScriptRun(
        ranks=tuple(ranks),
        start=tuple(step for step in complete if step.number == 0),
        steps=tuple(step for step in complete if step.number),
    )
