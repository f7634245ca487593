"""Example runs of one microbatch before placement, to measure block times and to choose a tensor plan."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.settings import PlacementSettings
from paceline.parallel.initialization.deferred_fill import DeferredModel
from paceline.parallel.module_access.user_call_isolation import side_effect_free
from paceline.parallel.tensor_parallel.auto_plan import choose_plan
from paceline.parallel.tensor_parallel.tensor_plan import TensorPlan
from paceline.profiling.model_tracing.block_timer import BlockTimes, time_blocks

Found = TypeVar("Found")


class ExampleRun(Protocol):
    """Forward and loss on one microbatch."""

    def __call__(self) -> object:
        """Run the job's model in training mode."""

    def run(self, model: nn.Module) -> Any:
        """Run `model` in its current mode; return its loss sums."""

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """Return the result of `compute`, which is cached by `key` and shared by all copies of a model."""


def seconds_of(
    model: nn.Module, how: PlacementSettings, world: World, example: ExampleRun, late: DeferredModel | None = None
) -> Callable[[Mapping[str, nn.Module]], list[float]] | None:
    """Return a function that measures each block's forward and backward on rank 0; None if stages need no times.

    A model on the meta device gets values for one block at a time, and for the modules outside the blocks throughout.
    """
    if how.balance != "measured" or how.stages:
        return None

    def seconds(blocks: Mapping[str, nn.Module]) -> list[float]:
        found = None
        if world.is_main:
            found = list(_timed(model, blocks, example, late).total)
        return list(world.share_json(found))

    return seconds


def _timed(
    model: nn.Module, blocks: Mapping[str, nn.Module], example: ExampleRun, late: DeferredModel | None
) -> BlockTimes:
    timed = partial(time_blocks, model, blocks=blocks, call=lambda: _scalar(example()))
    if late is None:
        with side_effect_free(model) as written:
            example()
        with side_effect_free(model, parameters=bool(written)):  # detection of writes slows down each operation
            return timed()
    inside = {id(parameter) for block in blocks.values() for parameter in block.parameters()}
    with (
        side_effect_free(model, parameters=False),
        late.held([parameter for parameter in model.parameters() if id(parameter) not in inside]),
    ):
        return timed(hold_block=lambda block: late.held(block.parameters()))


def _scalar(terms: Any) -> Tensor:
    total: Tensor = sum(terms.values())
    return total


def tensor_plan(
    model: nn.Module, how: PlacementSettings, ranks: int, example: ExampleRun | None, late: DeferredModel | None = None
) -> TensorPlan:
    """Return the tensor plan: the user's file, else a plan derived from the example run, else the model's own plan."""
    file = None if how.tensor_plan is None else Path(how.tensor_plan)
    run = None if example is None else example.run
    choose = partial(choose_plan, model, ranks=ranks, run=run, file=file, replicate=how.replicate)

    def plan() -> TensorPlan:
        return choose() if late is None else late.planned(choose)

    return plan() if example is None else example.once(("tensor", ranks, file, tuple(how.replicate)), plan)
