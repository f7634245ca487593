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
    drawn_otherwise,
    drawn_unseen,
    watched_draws,
)
from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding, batch_length
from paceline.parallel.module_access.model_copy import copy_model
from paceline.parallel.module_access.user_call_isolation import side_effect_free
from paceline.torch_internals.private_api import run_backward
from paceline.torch_internals.pytree import tensor_leaves
from paceline.torch_internals.rng import host_states

_SEED = 0
_ZERO = 1e-4  # gradients below this fraction of the model's largest are rounding
_DOUBLE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


class InDouble(TorchFunctionMode):
    """A mode that replaces a lower precision that a forward or loss requests by float64: rounding would hide errors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call the function, with float64 for every lower precision among its arguments."""
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        named = {name: _raised(value) for name, value in (kwargs or {}).items()}
        return func(*(_raised(value) for value in args), **named)


def _raised(value: Any) -> Any:
    return _DOUBLE.get(value, value) if isinstance(value, torch.dtype) else value


@dataclass(frozen=True, kw_only=True)
class _Ran:
    outputs: list[Tensor]
    terms: list[Tensor]
    gradients: list[Tensor | None]
    seen: dict[str, Tensor]
    ended: tuple[object, ...] = ()
    draws: Sequence[RandomOp] = ()


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run of forward, loss and backward on a rank's shard, or on the full sequence if there is one rank."""

    twin: nn.Module
    batch: Any
    sequence: Mapping[str, int]
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Any] | None
    own_loss: bool
    weigh: "_Weigh"
    is_watched: bool = False

    def __call__(self, world: World) -> _Ran:
        same = {id(buffer): buffer for buffer in (() if self.twin.training else self.twin.buffers())}
        own = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in self.twin.parameters()}
        mirror = copy.deepcopy(self.twin, {**same, **own})  # shares memory, but has its own hooks and gradients
        placed = ContextParallel(model=mirror, sequence=self.sequence, world=world, own_loss=self.own_loss)
        part = placed.cut(self.batch)
        watching: AbstractContextManager[Sequence[RandomOp]] = watched_draws() if self.is_watched else nullcontext(())
        with watching as draws:
            with placed.forward(part), InDouble(), NoAttentionDropout(), _watched(mirror) as seen:
                output = self.forward(mirror, part.data)
            with InDouble():
                found = self.loss(output, part.data) if self.loss is not None else {}
        ended = host_states()
        target = _target(output, found, self.weigh, rank=world.rank, size=world.world_size)
        with placed.backward(part), InDouble(), NoAttentionDropout():
            run_backward([target], [None])
        return _ran(mirror, output, found, seen=seen, ended=ended, draws=draws)


def check_context(
    *,
    model: nn.Module,
    batch: Any,
    sequence: Mapping[str, int],
    ranks: int,
    forward: Callable[[nn.Module, Any], Any],
    loss: Callable[[Any, Any], Any] | None = None,
    own_loss: bool = False,
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
    twin = eager_experts(copy_model(model).double().eval())
    run = _Run(
        twin=twin,
        batch=batch,
        sequence=sequence,
        forward=forward,
        loss=loss,
        own_loss=own_loss,
        weigh=_Weigh(cut=cut),
    )
    names = [name for name, parameter in twin.named_parameters() if parameter.requires_grad]
    try:
        with side_effect_free(
            model, parameters=False
        ):  # protects what a copy shares with the model: generators, and objects that hooks write to
            _compare(run_simulated_ranks(run, ranks=1)[0], run_simulated_ranks(run, ranks=ranks), cut=cut, names=names)
            twin.train()
            _see_training(run, cut=cut, names=names)
    except RuntimeError as error:
        if not isinstance(error, CheckpointError) and "use_reentrant" not in str(error):
            raise
        raise _run_again() from error


def _see_training(run: _Run, *, cut: SequenceSharding, names: Sequence[str]) -> None:
    """Compare in training mode, with the same seed on each rank."""
    alone, parts = (run_simulated_ranks(run, ranks=size, seed=_SEED) for size in (1, cut.ranks))
    try:
        _compare(alone[0], parts, cut=cut, names=names)
    except LayoutError as error:
        what = f"in training mode, {error.what}"
        raise _drawn(run, cut) or LayoutError(what, cause=error.cause, hint=error.hint) from None
    if any(part.ended != alone[0].ended for part in parts):
        raise _drawn(run, cut) or drawn_unseen()


def _drawn(run: _Run, cut: SequenceSharding) -> LayoutError | None:
    """Run again, compare every random draw, and return an error for the first difference."""
    run = replace(run, is_watched=True)
    alone, *parts = [ran.draws for size in (1, cut.ranks) for ran in run_simulated_ranks(run, ranks=size, seed=_SEED)]
    return drawn_otherwise(alone, parts)


def _run_again() -> LayoutError:
    return LayoutError(
        "this model recomputes parts of its forward in backward (torch.utils.checkpoint), and these behave differently "
        "there.",
        cause="such a part reads a value made outside of it, such as the padded input of a convolution",
        hint="checkpoint(...) around whole blocks, or leave it out: --layout cp,remat=full recomputes the blocks",
    )


class _Weigh:
    """A weighted sum of outputs with one random weight per element, so that its gradient depends on all of them."""

    def __init__(self, *, cut: SequenceSharding) -> None:
        self._cut = cut

    def __call__(self, outputs: Sequence[Tensor], *, rank: int, size: int) -> Tensor:
        total = outputs[0].new_zeros(())
        held = self._cut.size(rank) if size > 1 else self._cut.length
        for output in outputs:
            dim = sequence_dimension(output, held)
            if dim is None or not output.requires_grad:
                continue
            shape = [self._cut.length if d == dim else n for d, n in enumerate(output.shape)]
            weights = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            mine = self._cut.take(weights, dim=dim, rank=rank) if size > 1 else weights
            total = total + (output * mine.to(output.device)).sum()
        return total


def _target(output: Any, found: Any, weigh: _Weigh, *, rank: int, size: int) -> Tensor:
    """Return the scalar whose gradients are compared: a weighted sum of all outputs, plus the loss sums."""
    if isinstance(found, Tensor):
        raise LayoutError(
            "the loss is one number, a mean over its samples: parts of a sequence do not add up to it.",
            cause="each rank has some of a sample's positions, and a mean of means differs from the mean",
            hint="loss -> (loss_sum, count), as in F.cross_entropy(..., reduction='sum'), targets.numel()",
        )
    target = weigh(_outputs(output), rank=rank, size=size)
    target = target + sum((term for term in _terms(found)[::2]), target.new_zeros(()))
    if not target.requires_grad:
        raise LayoutError(
            "no output of this model has a sequence dimension.",
            cause="a pooled output (a classifier, an embedding) needs every position at once",
            hint="leave cp out",
        )
    return target


def _outputs(output: Any) -> list[Tensor]:
    return [t for t in tensor_leaves(output) if t.is_floating_point() and t.dim() > 1]


def _terms(found: Any) -> list[Tensor]:
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
) -> _Ran:
    return _Ran(
        outputs=[o.detach() for o in _outputs(output)],
        terms=[t.detach() for t in _terms(found)],
        gradients=[p.grad for p in model.parameters() if p.requires_grad],
        seen={name: tensor.detach() for name, tensor in seen.items()},
        ended=ended,
        draws=draws,
    )


def _compare(alone: _Ran, parts: Sequence[_Ran], *, cut: SequenceSharding, names: Sequence[str]) -> None:
    for number, whole in enumerate(alone.outputs):
        if not equal_when_joined(whole, [part.outputs[number] for part in parts], cut):
            raise _different(_first_module(alone, parts, cut))
    for number, whole in enumerate(alone.terms):
        terms = torch.stack([part.terms[number] for part in parts])
        total = terms.sum()
        if not equal_up_to_rounding(total, whole, scale=largest_magnitude(terms)):
            raise LayoutError(
                f"the loss over the parts adds up to {float(total):.9g}, over the whole it is {float(whole):.9g}.",
                cause="a loss that compares a position with its neighbour (logits[:, :-1] with labels[:, 1:]), "
                "or one that is a mean",
                hint="shift the targets by one in the dataset: (ids[:-1], ids[1:]); and loss -> (sum, count)",
            )
    least = _ZERO * max((largest_magnitude(g) for g in alone.gradients if g is not None), default=0.0)
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


def _first_module(alone: _Ran, parts: Sequence[_Ran], cut: SequenceSharding) -> str:
    for name, whole in alone.seen.items():
        mine = [part.seen.get(name) for part in parts]
        if any(m is None for m in mine) or not equal_when_joined(whole, [m for m in mine if m is not None], cut):
            return name
    return "the model's own forward, after its last module"


def _different(name: str) -> LayoutError:
    return LayoutError(
        f"split along the sequence, this model gives different outputs; the first that differs is that of {name}.",
        cause="it combines several positions (attention by matmul and softmax, a shift, a sum over the sequence) or "
        "counts positions itself",
        hint="F.scaled_dot_product_attention in it (transformers: attn_implementation='sdpa'), positions from "
        "torch.arange(x.shape[1]), or position_ids in the batch; or leave cp out",
    )


def eager_experts(model: nn.Module) -> nn.Module:
    """Switch transformers' experts to plain matmuls, since torch's grouped matmul has no float64."""
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")
    return model


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, Tensor]]:
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
