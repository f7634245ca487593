"""What a rank of a pipeline does at its stages: the user's forward and loss, and sums of weights that several hold."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.gradients.tied_parameters import sum_tied_gradients
from paceline.parallel.pipeline.chain.split import StageSplit
from paceline.parallel.pipeline.chain.stages import StageOutput, Stages


class Staged:
    """The `StageWork` of a pipeline over `Stages`: `call(microbatch)` is the forward, and on the last stage the loss.

    `enter(microbatch)` runs before each, on every stage: `RandomStreams.enter`, a statistics tape. What the last stage
    returned stays in `results` by microbatch, without its graph.
    """

    def __init__(
        self, stages: Stages, *, call: Callable[[int], Any], enter: Callable[[int], None] = lambda microbatch: None
    ) -> None:
        self.stages = stages
        self.results: dict[int, Any] = {}
        self._call = call
        self._enter = enter

    def forward(self, *, stage: int, microbatch: int, received: StageOutput | None) -> Any:
        """One microbatch through one stage."""
        self._enter(microbatch)
        output = self.stages.run(stage, received, lambda: self._call(microbatch))
        if not isinstance(output, StageOutput):
            self.results[microbatch] = output.detach() if isinstance(output, Tensor) else output
        return output

    def again(self, *, microbatch: int) -> AbstractContextManager[None]:
        """Give what its backward runs in."""
        return nullcontext()

    def before_backward(self, *, stage: int, microbatch: int) -> None:
        """Nothing to prepare."""

    def after_backward(self, *, stage: int, microbatch: int) -> None:
        """Nothing to collect."""


def add_ties(model: nn.Module, *, cut: StageSplit, rank_of_stage: Sequence[int], world: World) -> None:
    """Leave in `.grad` of each parameter that several ranks hold the sum over them, equal on all; all ranks call it.

    Stages of one rank share the parameter, and autograd has added theirs. Terms are added in the order of ranks.
    """
    parameters = dict(model.named_parameters())
    for place, (name, stages) in enumerate(sorted(cut.ties.items())):
        ranks = sorted({rank_of_stage[stage] for stage in stages})
        if world.rank in ranks and len(ranks) > 1:
            parameters[name].grad = sum_tied_gradients(parameters[name], ranks=ranks, place=place, world=world)
