"""A check, in one process and before the run starts, that a model gives the same results on a sharded sequence.

Threads simulate the ranks and share the model's memory. Each thread runs the model on its shard. Outputs, loss terms
and gradients are compared with those of the full sequence. The check uses float64, in which rounding errors are ten
orders of magnitude smaller than mistakes. It runs the model first in evaluation mode and then in training mode, where
it also compares random draws.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks
from paceline.errors import LayoutError
from paceline.parallel.context_parallel.compare_split_results import (
    equal_up_to_rounding,
    equal_when_joined,
    largest_magnitude,
    sequence_dimension,
)
from paceline.parallel.context_parallel.context_parallel import ContextParallel, refuse_model, refuse_window
from paceline.parallel.context_parallel.random_ops import (
    NoAttentionDropout,
    RandomOp,
    find_random_op_error,
    hidden_draws_error,
    record_random_ops,
)
from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding, batch_length
from paceline.parallel.module_access.model_copy import copy_model
from paceline.parallel.module_access.user_call_isolation import side_effect_free
from paceline.torch_internals.private_api import run_backward
from paceline.torch_internals.pytree import tensor_leaves
from paceline.torch_internals.rng import cpu_rng_states

_SEED = 0
_MIN_GRADIENT_RATIO = 1e-4  # the tolerance of tiny gradients is relative to this fraction of the largest gradient
_FLOAT64_DTYPES = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


class Float64Mode(TorchFunctionMode):
    """A mode that uses float64 where a forward or loss requests a lower precision, whose rounding would hide errors."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call the function, with float64 for every lower precision among its arguments."""
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        keyword_arguments = {name: _to_float64_dtype(value) for name, value in (kwargs or {}).items()}
        return func(*(_to_float64_dtype(value) for value in args), **keyword_arguments)


def _to_float64_dtype(value: Any) -> Any:
    return _FLOAT64_DTYPES.get(value, value) if isinstance(value, torch.dtype) else value


@dataclass(frozen=True, kw_only=True)
class _RunResult:
    """The results of one rank. `module_outputs` maps "name (class)" of modules without children to their outputs."""

    outputs: list[Tensor]
    loss_terms: list[Tensor]
    gradients: list[Tensor | None]
    module_outputs: dict[str, Tensor]
    rng_states: tuple[object, ...] = ()
    random_ops: Sequence[RandomOp] = ()


@dataclass(frozen=True, kw_only=True)
class _SimulatedRun:
    """A function that runs forward, loss and backward of one rank on its shard; with one rank, on the full sequence.

    `weighted_sum` of the outputs, plus the loss, is the scalar on which it calls backward.
    """

    model: nn.Module
    batch: Any
    sequence: Mapping[str, int]
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Any] | None
    is_model_loss: bool
    weighted_sum: "_WeightedSum"
    should_record_random_ops: bool = False

    def __call__(self, world: World) -> _RunResult:
        shared_buffers = {id(buffer): buffer for buffer in (() if self.model.training else self.model.buffers())}
        shared_parameters = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in self.model.parameters()}
        model = copy.deepcopy(self.model, {**shared_buffers, **shared_parameters})  # hooks and gradients are separate
        context = ContextParallel(model=model, sequence=self.sequence, world=world, is_model_loss=self.is_model_loss)
        batch_shard = context.shard(self.batch)
        recorder: AbstractContextManager[Sequence[RandomOp]] = (
            record_random_ops() if self.should_record_random_ops else nullcontext(())
        )
        with recorder as random_ops:
            with context.forward(batch_shard), Float64Mode(), NoAttentionDropout(), _record_outputs(model) as by_module:
                output = self.forward(model, batch_shard.data)
            with Float64Mode():
                loss = self.loss(output, batch_shard.data) if self.loss is not None else {}
        rng_states = cpu_rng_states()
        target = _gradient_target(output, loss, self.weighted_sum, rank=world.rank, size=world.world_size)
        with context.backward(batch_shard), Float64Mode(), NoAttentionDropout():
            run_backward([target], [None])
        return _RunResult(
            outputs=[tensor.detach() for tensor in _outputs(output)],
            loss_terms=[term.detach() for term in _loss_terms(loss)],
            gradients=[p.grad for p in model.parameters() if p.requires_grad],
            module_outputs={name: tensor.detach() for name, tensor in by_module.items()},
            rng_states=rng_states,
            random_ops=random_ops,
        )


def check_context(
    *,
    model: nn.Module,
    batch: Any,
    sequence: Mapping[str, int],
    ranks: int,
    forward: Callable[[nn.Module, Any], Any],
    loss: Callable[[Any, Any], Any] | None = None,
    is_model_loss: bool = False,
) -> None:
    """Compare `forward(model, batch)` on the full sequence with the same forward sharded over `ranks`.

    A few samples of the job's sequence length are enough. `loss(output, batch)` returns `(sum, count)` or a dict of
    them. The check uses a copy; the model does not change.

    Raises:
        LayoutError: the results differ; the message names the first module whose output differs, or the loss, or the
            gradient.
    """
    refuse_model(model)
    refuse_window(model, length=batch_length(batch, sequence=sequence))
    batch = to_float64(batch)
    sharding = SequenceSharding(length=batch_length(batch, sequence=sequence), ranks=ranks)
    model_copy = use_eager_experts(copy_model(model).double().eval())
    run = _SimulatedRun(
        model=model_copy,
        batch=batch,
        sequence=sequence,
        forward=forward,
        loss=loss,
        is_model_loss=is_model_loss,
        weighted_sum=_WeightedSum(sharding=sharding),
    )
    names = [name for name, parameter in model_copy.named_parameters() if parameter.requires_grad]
    try:
        # The copy and the model share random generators, and the objects that hooks write to.
        with side_effect_free(model, parameters=False):
            (full_result,) = run_simulated_ranks(run, ranks=1)
            _compare(full_result, run_simulated_ranks(run, ranks=ranks), sharding=sharding, names=names)
            model_copy.train()
            _compare_training(run, sharding=sharding, names=names)
    except RuntimeError as error:
        if not isinstance(error, CheckpointError) and "use_reentrant" not in str(error):
            raise
        raise _recompute_error() from error


def _compare_training(run: _SimulatedRun, *, sharding: SequenceSharding, names: Sequence[str]) -> None:
    """Compare in training mode, with the same seed on each rank."""
    (full_result,) = run_simulated_ranks(run, ranks=1, seed=_SEED)
    shard_results = run_simulated_ranks(run, ranks=sharding.ranks, seed=_SEED)
    try:
        _compare(full_result, shard_results, sharding=sharding, names=names)
    except LayoutError as error:
        what = f"in training mode, {error.what}"
        raise _random_op_error(run, sharding) or LayoutError(what, cause=error.cause, hint=error.hint) from None
    if any(result.rng_states != full_result.rng_states for result in shard_results):
        raise _random_op_error(run, sharding) or hidden_draws_error()


def _random_op_error(run: _SimulatedRun, sharding: SequenceSharding) -> LayoutError | None:
    """Run again with recorded random operations; return an error for the first difference, or None."""
    run = replace(run, should_record_random_ops=True)
    (full_result,) = run_simulated_ranks(run, ranks=1, seed=_SEED)
    shard_results = run_simulated_ranks(run, ranks=sharding.ranks, seed=_SEED)
    return find_random_op_error(full_result.random_ops, [result.random_ops for result in shard_results])


def _recompute_error() -> LayoutError:
    return LayoutError(
        "this model recomputes parts of its forward in backward (torch.utils.checkpoint), and these behave differently "
        "there.",
        cause="such a part reads a value made outside of it, such as the padded input of a convolution",
        hint="checkpoint(...) around whole blocks, or leave it out: --layout cp,remat=full recomputes the blocks",
    )


class _WeightedSum:
    """A sum of all output elements with random weights, so that a change of one element changes the sum."""

    def __init__(self, *, sharding: SequenceSharding) -> None:
        self._sharding = sharding

    def __call__(self, outputs: Sequence[Tensor], *, rank: int, size: int) -> Tensor:
        """Return the part of the sum that rank `rank` of `size` ranks computes."""
        total = outputs[0].new_zeros(())
        local_length = self._sharding.local_length(rank) if size > 1 else self._sharding.length
        for output in outputs:
            dim = sequence_dimension(output, local_length)
            if dim is None or not output.requires_grad:
                continue
            shape = [self._sharding.length if d == dim else n for d, n in enumerate(output.shape)]
            weights = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            local_weights = self._sharding.shard(weights, dim=dim, rank=rank) if size > 1 else weights
            total = total + (output * local_weights.to(output.device)).sum()
        return total


def _gradient_target(output: Any, loss: Any, weighted_sum: _WeightedSum, *, rank: int, size: int) -> Tensor:
    """Return the scalar whose gradients are compared: a weighted sum of all outputs, plus the loss sums."""
    if isinstance(loss, Tensor):
        raise LayoutError(
            "the loss is one number, a mean over its samples: parts of a sequence do not add up to it.",
            cause="each rank has some of a sample's positions, and a mean of means differs from the mean",
            hint="loss -> (loss_sum, count), as in F.cross_entropy(..., reduction='sum'), targets.numel()",
        )
    target = weighted_sum(_outputs(output), rank=rank, size=size)
    target = target + sum((term for term in _loss_terms(loss)[::2]), target.new_zeros(()))
    if not target.requires_grad:
        raise LayoutError(
            "no output of this model has a sequence dimension.",
            cause="a pooled output (a classifier, an embedding) needs every position at once",
            hint="leave cp out",
        )
    return target


def _outputs(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensor_leaves(output) if tensor.is_floating_point() and tensor.dim() > 1]


def _loss_terms(loss: Any) -> list[Tensor]:
    pairs = loss if isinstance(loss, Mapping) else {"loss": loss} if isinstance(loss, tuple) else {}
    return [torch.as_tensor(value, dtype=torch.float64) for pair in pairs.values() for value in pair]


def _compare(
    full_result: _RunResult, shard_results: Sequence[_RunResult], *, sharding: SequenceSharding, names: Sequence[str]
) -> None:
    """Raise LayoutError if the shards' outputs, loss terms or gradients differ from those of the full sequence."""
    for index, expected in enumerate(full_result.outputs):
        if not equal_when_joined(expected, [result.outputs[index] for result in shard_results], sharding):
            raise _different_outputs_error(_first_different_module(full_result, shard_results, sharding))
    for index, expected in enumerate(full_result.loss_terms):
        terms = torch.stack([result.loss_terms[index] for result in shard_results])
        total = terms.sum()
        if not equal_up_to_rounding(total, expected, scale=largest_magnitude(terms)):
            raise LayoutError(
                f"the losses of the parts add up to {float(total):.9g}; "
                f"the loss of the full sequence is {float(expected):.9g}.",
                cause="a loss that compares a position with its neighbour (logits[:, :-1] with labels[:, 1:]), "
                "or one that is a mean",
                hint="shift the targets by one in the dataset: (ids[:-1], ids[1:]); and loss -> (sum, count)",
            )
    magnitudes = [largest_magnitude(gradient) for gradient in full_result.gradients if gradient is not None]
    min_scale = _MIN_GRADIENT_RATIO * max(magnitudes, default=0.0)
    for index, (name, full_gradient) in enumerate(zip(names, full_result.gradients, strict=True)):
        gradients = [gradient for result in shard_results if (gradient := result.gradients[index]) is not None]
        if full_gradient is None and not gradients:
            continue
        total = torch.stack(gradients).sum(0) if gradients else torch.zeros(())
        # Terms may cancel, as in the gradient of a key's bias: its rounding error depends on the size of the terms.
        scale = max([min_scale, *map(largest_magnitude, gradients)])
        if full_gradient is None or not equal_up_to_rounding(total, full_gradient, scale=scale):
            raise LayoutError(
                f"the gradients of {name} from parts of a sequence do not add up to its gradient over the full one.",
                cause=f"the model computes the same outputs, but does not apply {name} to each position separately",
                hint="leave cp out for this model",
            )


def _first_different_module(
    full_result: _RunResult, shard_results: Sequence[_RunResult], sharding: SequenceSharding
) -> str:
    """Return, in words, the first module in call order whose outputs differ."""
    for name, expected in full_result.module_outputs.items():
        outputs = [result.module_outputs.get(name) for result in shard_results]
        if any(m is None for m in outputs) or not equal_when_joined(
            expected, [m for m in outputs if m is not None], sharding
        ):
            return f"the module {name}"
    return "the model's own forward, after its last module"


def _different_outputs_error(name: str) -> LayoutError:
    return LayoutError(
        "this model gives different outputs if it is split along the sequence; the first one that differs comes from "
        f"{name}.",
        cause="it combines several positions (attention by matmul and softmax, a shift, a sum over the sequence) or "
        "counts positions itself",
        hint="F.scaled_dot_product_attention in it (transformers: attn_implementation='sdpa'), positions from "
        "torch.arange(x.shape[1]), or position_ids in the batch; or leave cp out",
    )


def use_eager_experts(model: nn.Module) -> nn.Module:
    """Switch transformers' experts to plain matmuls, since torch's grouped matmul has no float64."""
    set_implementation: Any = getattr(model, "set_experts_implementation", None)
    if set_implementation is not None:
        set_implementation("eager")
    return model


@contextmanager
def _record_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the output of the first call of each module without children, by "name (class)", in call order."""
    outputs: dict[str, Tensor] = {}
    handles = []

    def add_hook(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs.setdefault(f"{name} ({type(module).__name__})", output)

        handles.append(module.register_forward_hook(hook))

    for name, module in model.named_modules():
        if not list(module.children()):
            add_hook(name, module)
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def to_float64(value: Any) -> Any:
    """Return a batch with its floats in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: to_float64(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(to_float64(item) for item in value)
    return value
