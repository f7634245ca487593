"""Run one microbatch before placement, to measure block times and to choose a tensor plan."""

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

Result = TypeVar("Result")


class ExampleRun(Protocol):
    """Forward and loss on one microbatch."""

    def __call__(self) -> object:
        """Run the job's model in training mode."""

    def run(self, model: nn.Module) -> Any:
        """Run `model` in its current mode; return its loss sums."""

    def once(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return the result of `compute`, which is cached by `key` and shared by all copies of a model."""


def make_block_timer(
    model: nn.Module,
    settings: PlacementSettings,
    world: World,
    example_run: ExampleRun,
    deferred_model: DeferredModel | None = None,
) -> Callable[[Mapping[str, nn.Module]], list[float]] | None:
    """Return a function that measures each block's forward and backward on rank 0; None if stages need no times.

    If the model is on the meta device, the modules outside the blocks get values during the whole measurement, and each
    block only while it is measured.
    """
    if settings.balance != "measured" or settings.stages:
        return None

    def measure(blocks: Mapping[str, nn.Module]) -> list[float]:
        times = None
        if world.is_main:
            times = list(_measure_blocks(model, blocks, example_run, deferred_model).block_seconds)
        return list(world.share_json(times))

    return measure


def _measure_blocks(
    model: nn.Module, blocks: Mapping[str, nn.Module], example_run: ExampleRun, deferred_model: DeferredModel | None
) -> BlockTimes:
    measure = partial(time_blocks, model, blocks=blocks, call=lambda: _scalar(example_run()))
    if deferred_model is None:
        with side_effect_free(model) as written:
            example_run()
        with side_effect_free(model, parameters=bool(written)):  # detection of writes slows down each operation
            return measure()
    block_parameters = {id(parameter) for block in blocks.values() for parameter in block.parameters()}
    with (
        side_effect_free(model, parameters=False),
        deferred_model.temporary_values(
            [parameter for parameter in model.parameters() if id(parameter) not in block_parameters]
        ),
    ):
        return measure(materialize_block=lambda block: deferred_model.temporary_values(block.parameters()))


def _scalar(terms: Any) -> Tensor:
    """Return the sum of all loss terms."""
    total: Tensor = sum(terms.values())
    return total


def choose_tensor_plan(
    model: nn.Module,
    settings: PlacementSettings,
    ranks: int,
    example_run: ExampleRun | None,
    deferred_model: DeferredModel | None = None,
) -> TensorPlan:
    """Return the tensor plan: the user's file, else a plan derived from the example run, else the model's own plan."""
    file = None if settings.tensor_plan is None else Path(settings.tensor_plan)
    run = None if example_run is None else example_run.run
    choose = partial(choose_plan, model, ranks=ranks, run=run, file=file, replicate=settings.replicate)

    def compute() -> TensorPlan:
        return choose() if deferred_model is None else deferred_model.run_without_values(choose)

    if example_run is None:
        return compute()
    return example_run.once(("tensor", ranks, file, tuple(settings.replicate)), compute)
