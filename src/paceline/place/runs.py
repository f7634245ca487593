"""What a model is asked with before it is placed: one microbatch, and the settings of tensor plans."""

from pathlib import Path
from typing import Any, Protocol

from torch import nn

from paceline.place.tensor.derive import choose_plan
from paceline.place.tensor.plan import TensorPlan
from paceline.spec.settings import Place


class Runs(Protocol):
    """Forward and loss on one microbatch."""

    def __call__(self) -> object:
        """Of the job's model, in training mode."""

    def run(self, model: nn.Module) -> Any:
        """Of this model, as it is; its sums."""


def tensor_plan(model: nn.Module, how: Place, ranks: int, example: Runs | None) -> TensorPlan:
    """The user's file, else derived from the example, else the model's own."""
    file = None if how.tensor_plan is None else Path(how.tensor_plan)
    run = None if example is None else example.run
    return choose_plan(model, ranks=ranks, run=run, file=file, replicate=how.replicate)
