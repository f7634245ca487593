"""A check, in one process and before the run starts, that a model gives the same results on a sharded sequence.

Threads simulate the ranks and share the model's memory. Each runs its shard; outputs, loss terms and gradients are
compared with those of the full sequence. The check uses float64, in which rounding errors are ten orders of magnitude
smaller than mistakes. It runs the model in evaluation mode first, then in training mode with its random draws.
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
    different_hidden_draws,
    different_random_op,
    record_random_ops,
)
from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding, batch_length
from paceline.parallel.module_access.model_copy import copy_model
from paceline.parallel.module_access.user_call_isolation import side_effect_free
from paceline.torch_internals.private_api import add_gradients
from paceline.torch_internals.pytree import tensor_leaves
from paceline.torch_internals.rng import cpu_rng_states

_SEED = 0
_MIN_GRADIENT_RATIO = 1e-4  # gradients below this fraction of the model's largest are rounding
_FLOAT64_DTYPES = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


class Float64Mode(TorchFunctionMode):
    """A mode that replaces a lower precision that a forward or loss requests by float64: rounding would hide errors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call the function, with float64 for every lower precision among its arguments."""
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        named = {name: _to_float64_dtype(value) for name, value in (kwargs or {}).items()}
        return func(*(_to_float64_dtype(value) for value in args), **named)


def _to_float64_dtype(value: Any) -> Any:
    return _FLOAT64_DTYPES.get(value, value) if isinstance(value, torch.dtype) else value


@dataclass(frozen=True, kw_only=True)
class _RunResult:
    outputs: list[Tensor]
    loss_terms: list[Tensor]
    gradients: list[Tensor | None]
    module_outputs: dict[str, Tensor]
    rng_states: tuple[object, ...] = ()
    random_ops: Sequence[RandomOp] = ()


@dataclass(frozen=True, kw_only=True)
class _TrainingRun:
    """A run of forward, loss and backward on a rank's shard, or on the full sequence if there is one rank."""

    model: nn.Module
    batch: Any
    sequence: Mapping[str, int]
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Any] | None
    is_model_loss: bool
    weighted_sum: "_WeightedSum"
    should_record_random_ops: bool = False

    def __call__(self, world: World) -> _RunResult:
        same = {id(buffer): buffer for buffer in (() if self.model.training else self.model.buffers())}
        own = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in self.model.parameters()}
        mirror = copy.deepcopy(self.model, {**same, **own})  # shares memory, but has its own hooks and gradients
        placed = ContextParallel(model=mirror, sequence=self.sequence, world=world, is_model_loss=self.is_model_loss)
        part = placed.shard(self.batch)
        watching: AbstractContextManager[Sequence[RandomOp]] = (
            record_random_ops() if self.should_record_random_ops else nullcontext(())
        )
        with watching as draws:
            with placed.forward(part), Float64Mode(), NoAttentionDropout(), _record_module_outputs(mirror) as seen:
                output = self.forward(mirror, part.data)
            with Float64Mode():
                found = self.loss(output, part.data) if self.loss is not None else {}
        ended = cpu_rng_states()
        target = _gradient_target(output, found, self.weighted_sum, rank=world.rank, size=world.world_size)
        with placed.backward(part), Float64Mode(), NoAttentionDropout():
            add_gradients([target], [None])
        return _ran(mirror, output, found, seen=seen, ended=ended, draws=draws)


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
    cut = SequenceSharding(length=batch_length(batch, sequence=sequence), ranks=ranks)
    twin = use_eager_experts(copy_model(model).double().eval())
    run = _TrainingRun(
        model=twin,
        batch=batch,
        sequence=sequence,
        forward=forward,
        loss=loss,
        is_model_loss=is_model_loss,
        weighted_sum=_WeightedSum(sharding=cut),
    )
    names = [name for name, parameter in twin.named_parameters() if parameter.requires_grad]
    try:
        with side_effect_free(
            model, parameters=False
        ):  # protects what a copy shares with the model: generators, and objects that hooks write to
            _compare(
                run_simulated_ranks(run, ranks=1)[0], run_simulated_ranks(run, ranks=ranks), sharding=cut, names=names
            )
            twin.train()
            _compare_training(run, sharding=cut, names=names)
    except RuntimeError as error:
        if not isinstance(error, CheckpointError) and "use_reentrant" not in str(error):
            raise
        raise _different_recompute() from error


def _compare_training(run: _TrainingRun, *, sharding: SequenceSharding, names: Sequence[str]) -> None:
    """Compare in training mode, with the same seed on each rank."""
    alone, parts = (run_simulated_ranks(run, ranks=size, seed=_SEED) for size in (1, sharding.ranks))
    try:
        _compare(alone[0], parts, sharding=sharding, names=names)
    except LayoutError as error:
        what = f"in training mode, {error.what}"
        raise _random_op_error(run, sharding) or LayoutError(what, cause=error.cause, hint=error.hint) from None
    if any(part.rng_states != alone[0].rng_states for part in parts):
        raise _random_op_error(run, sharding) or different_hidden_draws()


def _random_op_error(run: _TrainingRun, cut: SequenceSharding) -> LayoutError | None:
    """Run again, compare every random draw, and return an error for the first difference."""
    run = replace(run, is_watched=True)
    alone, *parts = [
        ran.random_ops for size in (1, cut.ranks) for ran in run_simulated_ranks(run, ranks=size, seed=_SEED)
    ]
    return different_random_op(alone, parts)


def _different_recompute() -> LayoutError:
    return LayoutError(
        "this model recomputes parts of its forward in backward (torch.utils.checkpoint), and these behave differently "
        "there.",
        cause="such a part reads a value made outside of it, such as the padded input of a convolution",
        hint="checkpoint(...) around whole blocks, or leave it out: --layout cp,remat=full recomputes the blocks",
    )


class _WeightedSum:
    """A weighted sum of outputs with one random weight per element, so that its gradient depends on all of them."""

    def __init__(self, *, sharding: SequenceSharding) -> None:
        self._sharding = sharding

    def __call__(self, outputs: Sequence[Tensor], *, rank: int, size: int) -> Tensor:
        total = outputs[0].new_zeros(())
        held = self._sharding.local_length(rank) if size > 1 else self._sharding.length
        for output in outputs:
            dim = sequence_dimension(output, held)
            if dim is None or not output.requires_grad:
                continue
            shape = [self._sharding.length if d == dim else n for d, n in enumerate(output.shape)]
            weights = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            mine = self._sharding.shard(weights, dim=dim, rank=rank) if size > 1 else weights
            total = total + (output * mine.to(output.device)).sum()
        return total


def _gradient_target(output: Any, found: Any, weigh: _WeightedSum, *, rank: int, size: int) -> Tensor:
    """Return the scalar whose gradients are compared: a weighted sum of all outputs, plus the loss sums."""
    if isinstance(found, Tensor):
        raise LayoutError(
            "the loss is one number, a mean over its samples: parts of a sequence do not add up to it.",
            cause="each rank has some of a sample's positions, and a mean of means differs from the mean",
            hint="loss -> (loss_sum, count), as in F.cross_entropy(..., reduction='sum'), targets.numel()",
        )
    target = weigh(_outputs(output), rank=rank, size=size)
    target = target + sum((term for term in _loss_terms(found)[::2]), target.new_zeros(()))
    if not target.requires_grad:
        raise LayoutError(
            "no output of this model has a sequence dimension.",
            cause="a pooled output (a classifier, an embedding) needs every position at once",
            hint="leave cp out",
        )
    return target


def _outputs(output: Any) -> list[Tensor]:
    return [t for t in tensor_leaves(output) if t.is_floating_point() and t.dim() > 1]


def _loss_terms(found: Any) -> list[Tensor]:
    pairs = found if isinstance(found, Mapping) else {"loss": found} if isinstance(found, tuple) else {}
    return [torch.as_tensor(value, dtype=torch.float64) for pair in pairs.values() for value in pair]


def _ran(
    model: nn.Module,
    output: Any,
    found: Any,
    *,
    seen: Mapping[str, Tensor],
    ended: tuple[object, ...],
    draws: Sequence[RandomOp],
) -> _RunResult:
    return _RunResult(
        outputs=[o.detach() for o in _outputs(output)],
        loss_terms=[t.detach() for t in _loss_terms(found)],
        gradients=[p.grad for p in model.parameters() if p.requires_grad],
        module_outputs={name: tensor.detach() for name, tensor in seen.items()},
        rng_states=ended,
        random_ops=draws,
    )


def _compare(
    alone: _RunResult, parts: Sequence[_RunResult], *, sharding: SequenceSharding, names: Sequence[str]
) -> None:
    for number, whole in enumerate(alone.outputs):
        if not equal_when_joined(whole, [part.outputs[number] for part in parts], sharding):
            raise _different_outputs(_first_different_module(alone, parts, sharding))
    for number, whole in enumerate(alone.loss_terms):
        terms = torch.stack([part.loss_terms[number] for part in parts])
        total = terms.sum()
        if not equal_up_to_rounding(total, whole, scale=largest_magnitude(terms)):
            raise LayoutError(
                f"the loss over the parts adds up to {float(total):.9g}, over the whole it is {float(whole):.9g}.",
                cause="a loss that compares a position with its neighbour (logits[:, :-1] with labels[:, 1:]), "
                "or one that is a mean",
                hint="shift the targets by one in the dataset: (ids[:-1], ids[1:]); and loss -> (sum, count)",
            )
    least = _MIN_GRADIENT_RATIO * max((largest_magnitude(g) for g in alone.gradients if g is not None), default=0.0)
    for number, (name, wanted) in enumerate(zip(names, alone.gradients, strict=True)):
        got = [part.gradients[number] for part in parts]
        given = [g for g in got if g is not None]
        if wanted is None and not given:
            continue
        total = torch.stack(given).sum(0) if given else torch.zeros(())
        scale = max(
            [least, *map(largest_magnitude, given)]
        )  # the gradient of a key's bias sums to 0: its rounding error is relative to the terms
        if wanted is None or not equal_up_to_rounding(total, wanted, scale=scale):
            raise LayoutError(
                f"the gradients of {name} from parts of a sequence do not add up to the whole gradient.",
                cause="it is not used position by position, although the outputs are equal",
                hint="leave cp out for this model",
            )


def _first_different_module(alone: _RunResult, parts: Sequence[_RunResult], cut: SequenceSharding) -> str:
    for name, whole in alone.module_outputs.items():
        mine = [part.module_outputs.get(name) for part in parts]
        if any(m is None for m in mine) or not equal_when_joined(whole, [m for m in mine if m is not None], cut):
            return name
    return "the model's own forward, after its last module"


def _different_outputs(name: str) -> LayoutError:
    return LayoutError(
        f"split along the sequence, this model gives different outputs; the first that differs is that of {name}.",
        cause="it combines several positions (attention by matmul and softmax, a shift, a sum over the sequence) or "
        "counts positions itself",
        hint="F.scaled_dot_product_attention in it (transformers: attn_implementation='sdpa'), positions from "
        "torch.arange(x.shape[1]), or position_ids in the batch; or leave cp out",
    )


def use_eager_experts(model: nn.Module) -> nn.Module:
    """Switch transformers' experts to plain matmuls, since torch's grouped matmul has no float64."""
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")
    return model


@contextmanager
def _record_module_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the first output of each module without children, by name and class, in the order of the forward."""
    seen: dict[str, Tensor] = {}
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(f"{name} ({type(module).__name__})", output)

        handles.append(module.register_forward_hook(hook))

    for name, module in model.named_modules():
        if not list(module.children()):
            watch(name, module)
    try:
        yield seen
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
