"""The work of a rank at its pipeline stages: the user's forward and loss, and the gradient sums of tied weights."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.gradients.tied_parameters import sum_tied_gradients
from paceline.parallel.pipeline.chain.split import StageSplit
from paceline.parallel.pipeline.chain.stages import StageOutput, Stages
from paceline.torch_internals.private_api import run_backward


class StageRunner:
    """The computations of one rank's stages. It implements the protocol `StageWork` of `schedule_interpreter`.

    `run_model(microbatch)` runs the forward and, on the last stage, the loss. `before_forward(microbatch)` runs before
    each forward on every stage, for example `RandomStreams.enter`. `results` has the last stage's outputs by
    microbatch, detached from their graphs.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        run_model: Callable[[int], Any],
        before_forward: Callable[[int], None] = lambda microbatch: None,
    ) -> None:
        self.stages = stages
        self.results: dict[int, Any] = {}
        self._run_model = run_model
        self._before_forward = before_forward

    def forward(self, *, stage: int, microbatch: int, received: StageOutput | None) -> Any:
        """Run one microbatch through one stage."""
        self._before_forward(microbatch)
        output = self.stages.run(stage, received, lambda: self._run_model(microbatch))
        if not isinstance(output, StageOutput):
            self.results[microbatch] = output.detach() if isinstance(output, Tensor) else output
        return output

    def backward_context(self, *, microbatch: int) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def run_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, microbatch: int) -> None:
        """Run the backward of a stage."""
        run_backward(outputs, gradients)

    def before_backward(self, *, stage: int, microbatch: int) -> None:
        """Do nothing: there is nothing to prepare."""

    def after_backward(self, *, stage: int, microbatch: int) -> None:
        """Do nothing: there is nothing to collect."""


def sum_tied_gradients_over_stages(
    model: nn.Module, *, split: StageSplit, rank_of_stage: Sequence[int], world: World
) -> None:
    """Sum the `.grad` of each parameter that stages of several ranks share. All ranks call this.

    The sum is in rank order and the same on all ranks. Stages of one rank share the parameter itself, so autograd has
    summed their gradients already.
    """
    parameters = dict(model.named_parameters())
    for position, (name, stages) in enumerate(sorted(split.ties.items())):
        ranks = sorted({rank_of_stage[stage] for stage in stages})
        if world.rank in ranks and len(ranks) > 1:
            parameters[name].grad = sum_tied_gradients(parameters[name], ranks=ranks, index=position, world=world)
