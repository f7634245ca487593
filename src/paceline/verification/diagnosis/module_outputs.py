"""Compare every module's output between the layout and one process, to find the first module that differs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.types import StepInput
from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor
from paceline.parallel.tensor_parallel.sharding import slice_shard
from paceline.torch_internals.private_api import is_in_backward, tree_flatten
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.reference.reference_step import ReferenceStep
from paceline.verification.tensor_distance import to_double

_MAX_ELEMENTS = 1 << 24  # recording stops after this many elements
_TOLERANCE = 2e-3  # outputs are the same up to this relative distance
_FACTOR_TOLERANCE = 1e-3
Key = tuple[int, str, int]  # microbatch, name of the module, index of the module's call in the microbatch


@dataclass(kw_only=True)
class ModuleOutputs:
    """The outputs of every module in the first `microbatches` microbatches, in the order of execution.

    `embedding_ids` are the inputs of embeddings. `_size` is the number of recorded elements; `_calls` counts the calls
    of each module, by microbatch and name.
    """

    microbatches: int
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    embedding_ids: dict[Key, Tensor] = field(default_factory=dict)
    _microbatch: int = -1
    _size: int = 0
    _calls: dict[tuple[int, str], int] = field(default_factory=dict)

    def set_microbatch(self, microbatch: int) -> int:
        """Set the microbatch that is run next, and return it."""
        self._microbatch = microbatch
        return microbatch

    @contextmanager
    def record(self, model: nn.Module) -> Iterator[None]:
        """Record the outputs while the model runs."""
        handles = [module.register_forward_hook(self._hook(name)) for name, module in model.named_modules() if name]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def record_output(module: nn.Module, args: Any, output: Any) -> None:
            if not 0 <= self._microbatch < self.microbatches or is_in_backward():
                return
            call = self._calls.get((self._microbatch, name), 0)
            self._calls[self._microbatch, name] = call + 1
            tensor = next((leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)), None)
            if tensor is None or not tensor.is_floating_point() or self._size > _MAX_ELEMENTS:
                return
            recorded = tensor if isinstance(tensor, ShardPropagatingTensor) else tensor.detach().clone()
            self._size += recorded.numel()
            self.outputs[self._microbatch, name, call] = recorded
            if isinstance(module, nn.Embedding) and args:
                self.embedding_ids[self._microbatch, name, call] = args[0].detach().clone()

        return record_output


def record_reference_outputs(reference_step: ReferenceStep, *, model: nn.Module, microbatches: int) -> ModuleOutputs:
    """Run the reference's step again, and return its module outputs."""
    outputs = ModuleOutputs(microbatches=microbatches)
    with outputs.record(model):
        reference_step.compute_again(random_microbatch=outputs.set_microbatch)
    return outputs


def record_layout_outputs(setup: TrainingSetup, step_input: StepInput, *, microbatches: int) -> ModuleOutputs:
    """Run the step, and return this rank's module outputs. Every rank must call this."""
    outputs, streams = ModuleOutputs(microbatches=microbatches), setup.step.replica.random_streams
    enter = streams.enter

    def enter_and_record(*, step: int, microbatch: int) -> None:
        outputs.set_microbatch(microbatch)
        enter(step=step, microbatch=microbatch)

    streams.enter = enter_and_record  # type: ignore[method-assign]
    try:
        with outputs.record(setup.model):
            setup.step.compute_gradients(step_input)
    finally:
        del streams.enter
    return outputs


def first_differing_module(
    setup: TrainingSetup, local_outputs: ModuleOutputs, reference_outputs: ModuleOutputs | None
) -> dict[str, Any] | None:
    """Return the first module, in one process's order of execution, whose output differs.

    The entry `module` has its name, or is empty if all outputs are right. The result is None if nothing could be
    compared. `ranks` have a wrong output, out of the ranks in `of`; `before` is the last module with a right output;
    `why` describes the error. Every rank must call this; only rank 0 has `reference_outputs`.
    """
    world = setup.world
    keys = world.share_json(
        None if reference_outputs is None else [[*key, list(t.shape)] for key, t in reference_outputs.outputs.items()]
    )
    previous, wrong_ranks = "", list[int]()
    compared = 0
    for microbatch, name, call, shape in keys:
        local_output = local_outputs.outputs.get((microbatch, name, call))
        dtype = next((t.dtype for t in setup.model.parameters() if t.is_floating_point()), torch.float32)
        expected_output = torch.empty(shape, dtype=dtype, device=world.device)
        if reference_outputs is not None:
            expected_output.copy_(reference_outputs.outputs[microbatch, name, call])
        world.broadcast(expected_output.contiguous())
        pair = None if local_output is None else _align_outputs(setup, local_output, expected_output)
        matches = world.gather_json(None if pair is None else _is_same(*pair))
        compared += sum(same is not None for same in matches)
        wrong_ranks = [rank for rank, same in enumerate(matches) if same is False]
        if wrong_ranks:
            compared_ranks = [rank for rank, same in enumerate(matches) if same is not None]
            ids = local_outputs.embedding_ids.get((microbatch, name, call))
            descriptions = world.gather_json(
                "" if pair is None or _is_same(*pair) else _describe_error(setup, name, *pair, ids)
            )
            return {
                "module": name,
                "ranks": wrong_ranks,
                "of": compared_ranks,
                "before": previous,
                "why": next((text for text in descriptions if text), ""),
                "compared": compared,
            }
        if any(matches):
            previous = name
    return {"module": "", "compared": compared} if compared else None


def _align_outputs(setup: TrainingSetup, local_output: Tensor, expected: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return this rank's output and the same shard of the expected output; None if they can't be compared."""
    if isinstance(local_output, ShardPropagatingTensor):
        if local_output.full_shape != tuple(expected.shape):
            return None
        expected, local_output = (
            slice_shard(expected, local_output.sharding, local_output.group.rank),
            local_output.local.detach(),
        )
    if local_output.shape != expected.shape:
        expected_shard = _take_sequence_shard(setup, local_output, expected)
        if expected_shard is None:
            return None
        expected = expected_shard
    return (to_double(local_output), to_double(expected)) if local_output.shape == expected.shape else None


def _is_same(local_output: Tensor, expected: Tensor) -> bool:
    return float((local_output - expected).norm()) <= _TOLERANCE * float(expected.norm())


def _describe_error(setup: TrainingSetup, name: str, local_output: Tensor, expected: Tensor, ids: Tensor | None) -> str:
    """Describe the error: a factor, a bias that is added several times, or wrong rows of one rank; empty otherwise."""
    error, module = local_output - expected, setup.model.get_submodule(name)
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor) and bias.shape == expected.shape[-1:]:
        factor = _fit_factor(error, bias.detach().double().expand_as(expected))
        if factor is not None:
            return f"its bias is added {1 + factor:.4g} times{_matching_degree(setup, 1 + factor)}"
    factor = _fit_factor(local_output, expected)
    if factor is not None:
        return f"it is {factor:.4g} times what it should be{_matching_degree(setup, factor)}"
    weight = f"{name}.weight"
    if ids is None or weight not in setup.weights.names or ids.shape != expected.shape[:-1]:
        return ""
    wrong = ids[error.norm(dim=-1) > _TOLERANCE * expected.norm(dim=-1)].unique()
    for rank, spec in enumerate(setup.weights.shard_specs(weight)):
        row_ranges = [(box.full_offset[0], box.full_offset[0] + box.size[0]) for box in spec.boxes]
        if not spec.is_full and all(any(low <= int(row) < high for low, high in row_ranges) for row in wrong):
            return (
                f"the rows that are looked up wrongly are all on rank {rank} "
                f"({row_ranges[0][0]} to {row_ranges[-1][1] - 1})"
            )
    return ""


def _fit_factor(actual: Tensor, expected: Tensor) -> float | None:
    """Return the factor between two proportional tensors; None if they are not proportional."""
    size = float((expected * expected).sum())
    factor = float((actual * expected).sum()) / size if size else 0.0
    return (
        factor
        if size and float((actual - factor * expected).norm()) <= _FACTOR_TOLERANCE * float(actual.norm())
        else None
    )


def _matching_degree(setup: TrainingSetup, factor: float) -> str:
    mesh = setup.worlds.mesh
    axes = [axis for axis in mesh.split_axes if abs(factor - mesh.size(axis)) < _FACTOR_TOLERANCE]
    return f", the {' or '.join(axes)} degree" if axes else ""


def _take_sequence_shard(setup: TrainingSetup, local_output: Tensor, full_output: Tensor) -> Tensor | None:
    """Return this rank's shard of the full output, if the sequence is sharded."""
    cp = setup.worlds.cp
    differing_dims = [
        d for d in range(min(local_output.dim(), full_output.dim())) if local_output.shape[d] != full_output.shape[d]
    ]
    if cp.world_size == 1 or local_output.dim() != full_output.dim() or len(differing_dims) != 1:
        return None
    sequence_sharding = SequenceSharding(length=full_output.shape[differing_dims[0]], ranks=cp.world_size)
    return sequence_sharding.shard(full_output, dim=differing_dims[0], rank=cp.rank)


def module_output_cause(
    difference: Mapping[str, Any], *, rank_names: RankNames | None, is_loss_wrong: bool, remat: bool, last_name: str
) -> str:
    """Return the cause that the module outputs show. `last_name`: the last wrong parameter in the model's order."""
    if difference["module"]:
        preceding = f" {difference['before']} is right;" if difference["before"] else ""
        location = _describe_ranks(difference, rank_names)
        reason = difference["why"] and f" ({difference['why']})"
        return (
            "the forward gives a different output than one process, from the same weights and samples, first at "
            f"{difference['module']}{location}{reason}:{preceding} the fault is in this module or in the operations "
            "right before it"
        )
    if is_loss_wrong:
        axes = [axis for axis in ("tp", "cp") if rank_names is not None and rank_names.mesh.size(axis) > 1]
        split_inputs = {
            "tp": "logits that are split over the vocabulary (tp)",
            "cp": "labels at the borders of the sequence parts (cp)",
        }
        inputs = ", ".join(["targets, labels and their count", *(split_inputs[axis] for axis in axes)])
        return f"every module's output is right but the loss is not: check the inputs of the loss: {inputs}"
    remat_cause = (
        "remat recomputes blocks in backward with different values than in forward (dropout's random numbers, a "
        "buffer, a different autocast); or "
        if remat
        else ""
    )
    location = f", first at {last_name}, the last parameter in the model's order that differs" if last_name else ""
    return (
        f"every module's output and the loss are right, so the fault is in backward or in the gradient reduction: "
        f"{remat_cause}the communication of the layout in backward{location}"
    )


def dropout_location(
    difference: Mapping[str, Any], *, rank_names: RankNames | None, is_loss_wrong: bool, remat: bool
) -> str:
    """Return text on where the layout draws different random numbers; empty if that is not known."""
    if difference["module"]:
        return f"first at {difference['module']}{_describe_ranks(difference, rank_names)}"
    if remat and not is_loss_wrong:
        return "only in backward, where remat recomputes blocks: the mask differs from forward's"
    return ""


def _describe_ranks(difference: Mapping[str, Any], rank_names: RankNames | None) -> str:
    if rank_names is None:
        return f", on rank {', '.join(map(str, difference['ranks']))}"
    return rank_names.describe(difference["ranks"], all_ranks=difference["of"])
