"""Truncate models for profiling: build a model once, and keep few of its equal blocks."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.errors import LayoutError
from paceline.job import Job
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.parallel.module_access.blocks import find_blocks, has_blocks
from paceline.parallel.module_access.model_copy import copy_model
from paceline.planner.model_costs.model_profile import LayerProfile
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.build_training_setup import build_model

KEPT_BLOCKS = 3  # of each list of equal blocks, in a profile


def build_once(job: Job, *, seed: int) -> Job:
    """Build the job's model once, on fake tensors. Return the job with a factory that copies this model."""
    if isinstance(job.model, PretrainedModel):
        return job
    with FakeExecutionMode() as fake_mode, preserve_rng():
        fake_mode.comparisons_are_true = False
        model = build_model(job, seed=seed)
    return _with_copied_model(job, model)


class ModelCopies:
    """A factory that copies a model. Callers store results that are valid for all copies in `shared_results`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.shared_results: dict[Hashable, Any] = {}

    def __call__(self) -> nn.Module:
        """Return another copy."""
        return copy_model(self._model)


def _with_copied_model(job: Job, model: nn.Module) -> Job:
    """Return the job with a factory that copies `model`, or the job itself if the model can't be copied."""
    copies = ModelCopies(model)
    try:
        with FakeExecutionMode():
            copies()
    except Exception:
        return job
    return replace(job, model=copies)


def restore_depth(blocks: Sequence[LayerProfile], depths: Sequence[int]) -> Iterator[LayerProfile]:
    """Yield the profiles of all blocks, from those of the kept blocks. `depths` are the original lengths of the lists.

    In each list, the middle one of the kept blocks represents the omitted blocks.
    """
    remaining = list(blocks)
    for depth in depths:
        kept, remaining = remaining[: min(depth, KEPT_BLOCKS)], remaining[min(depth, KEPT_BLOCKS) :]
        list_name = kept[0].name.rpartition(".")[0]
        all_blocks = kept if depth <= KEPT_BLOCKS else [kept[0], *[kept[1]] * (depth - 2), kept[2]]
        yield from (replace(part, name=f"{list_name}.{index}") for index, part in enumerate(all_blocks))


def truncate_depth(job: Job) -> tuple[Job, list[int]]:
    """Return the job with at most three blocks of each list of equal blocks, and the original lengths of the lists.

    Return the job itself and an empty list if nothing is omitted.
    """
    if isinstance(job.model, PretrainedModel):
        return job, []
    with FakeExecutionMode() as fake_mode, preserve_rng():
        fake_mode.comparisons_are_true = False
        model = job.model()
        depths = truncate_block_lists(model, KEPT_BLOCKS)
    return (_with_copied_model(job, model), depths) if depths else (job, [])


def set_num_blocks(job: Job, count: int) -> tuple[Job, int] | None:
    """Return the job with `count` blocks in its only list of equal blocks, and the original length of the list.

    Return None if the model can't be copied, or does not have exactly one list of more than `count` equal blocks.
    """
    model, depths = _truncated_model(job, count)
    truncated = _with_copied_model(job, model)
    return None if len(depths) != 1 or truncated is job else (truncated, depths[0])


def largest_tensor_per_block(job: Job, count: int) -> int:
    """Return the elements of the largest trainable tensor of a block, the minimum over `count` blocks.

    Return 0 if the model does not have exactly one list of more than `count` equal blocks.
    """
    model, depths = _truncated_model(job, count)
    blocks = named_blocks(model).values() if len(depths) == 1 else ()
    return min((max((p.numel() for p in b.parameters() if p.requires_grad), default=0) for b in blocks), default=0)


def _truncated_model(job: Job, count: int) -> tuple[nn.Module, list[int]]:
    """Return a new model of the job after `truncate_block_lists`, and the result of that function."""
    with FakeExecutionMode() as fake_mode, preserve_rng():
        fake_mode.comparisons_are_true = False
        model = job.model()
        return model, truncate_block_lists(model, count)


def truncate_block_lists(model: nn.Module, max_blocks: int) -> list[int]:
    """Keep at most `max_blocks` of each list of equal blocks, including the first and the last block.

    Return the original lengths of the lists. Return an empty list, and do not change the model, if no list is longer
    than `max_blocks`, if blocks are not equal, or if a list has other modules too.
    """
    lists: dict[str, list[nn.Module]] = {}
    for name, block in named_blocks(model).items():
        lists.setdefault(name.rpartition(".")[0], []).append(block)
    depths = [len(blocks) for blocks in lists.values()]
    block_lists: dict[str, Any] = {name: model.get_submodule(name) for name in lists}
    can_truncate = all(
        isinstance(block_lists[name], nn.ModuleList | nn.Sequential)
        and len(block_lists[name]) == len(blocks)
        and (len(blocks) <= max_blocks or _are_equal(blocks))
        for name, blocks in lists.items()
    )
    if not can_truncate or max(depths, default=0) <= max_blocks:
        return []
    for name, depth in zip(lists, depths, strict=True):
        del block_lists[name][max_blocks - 1 : depth - 1]
    return depths


def _are_equal(blocks: Sequence[nn.Module]) -> bool:
    descriptions = {
        repr(
            [
                type(block),
                *((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()),
                *((n, b.shape, b.dtype) for n, b in block.named_buffers()),
            ]
        )
        for block in blocks
    }
    return len(descriptions) == 1


def named_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's chain of blocks, which run one after another, by name; empty if it has no chain."""
    if not has_blocks(model):
        return {}
    try:
        return {block.name: block.module for block in find_blocks(model)}
    except LayoutError:
        return {}
