"""Ranks that need the same batches, because they have parts of one model, or parts of its sequences."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.script_check.judge.model_split import ModelSplit, find_split
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep, read_script_run


@dataclass(frozen=True)
class RankPeers:
    """The ranks of a run that are peers of each other."""

    run: ScriptRun

    @cached_property
    def split(self) -> ModelSplit | None:
        """The way in which the script splits the model by hand, if it does."""
        return find_split(self.run)

    def share_model(self, first: int, second: int) -> bool:
        """Return whether two ranks have different parts of the model: by hand, or as parts of a DTensor."""
        if self.split is not None:
            return self.split.are_peers(first, second)
        if self.run.sharding != "tensor":
            return False
        return any(
            step.ranks[first].weights[name].part != step.ranks[second].weights[name].part
            for step in self.run.start
            for name in step.ranks[first].weights.keys() & step.ranks[second].weights.keys()
        )

    def share_batches(self, first: int, second: int) -> bool:
        """Return whether a batch that both ranks read counts once: their models get other parts of it, or share it."""
        return self.share_model(first, second) or any(
            step.samples(first) != step.samples(second)
            for step in self.run.steps[:1]
            if step.samples(first) and step.samples(second)
        )

    def counted_ranks(self, step: ScriptStep) -> list[int]:
        """Return the ranks whose samples count: of those that share a model and have the same samples, the first."""
        found = list[int]()
        for rank in range(len(step.ranks)):
            samples = step.samples(rank)
            if not any(self.share_model(other, rank) and step.samples(other) == samples for other in found):
                found.append(rank)
        return found


def read_peers(folder: Path) -> RankPeers:
    """Return the peers of a recorded run.

    Raises:
        UsageError: a file can't be read.
    """
    return RankPeers(read_script_run(folder))
