"""Does this model give the same when its sequence is cut? Asked before anything is started, in one process.

The ranks are played by threads that share the model: each runs its part, and outputs, loss terms and gradients are
held against those of the whole. All in float64, where rounding and a mistake are ten orders of magnitude apart.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.errors import LayoutError
from paceline.place.context.cut import Cut, batch_length
from paceline.place.context.sequence import ContextParallel, refuse_model, refuse_window
from paceline.place.exchange import Exchange, play
from paceline.place.traceless import traceless

CLOSE = 1e-9
_LOW = (torch.float32, torch.float16, torch.bfloat16)


class InDouble(TorchFunctionMode):
    """A forward that asks for float32 gets float64: what it rounds there would hide what is asked here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Pass on, with every lower precision that is asked for by name raised."""
        if func is Tensor.float:
            return args[0].double()
        named = {name: _raised(value) for name, value in (kwargs or {}).items()}
        return func(*(_raised(value) for value in args), **named)


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value


@dataclass(frozen=True, kw_only=True)
class _Ran:
    outputs: list[Tensor]
    terms: list[Tensor]
    gradients: list[Tensor | None]
    seen: dict[str, Tensor]


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
    """Run `forward(model, batch)` whole and cut over `ranks`; a few samples of the job's own length are enough.

    `loss(output, batch)` gives `(sum, count)` or a dict of them. The model itself is left as it is (a copy is used).

    Raises:
        LayoutError: it can't be cut; names the first module whose output differs, or the loss, or the gradient.
    """
    refuse_model(model)
    refuse_window(model, length=batch_length(batch, sequence=sequence))
    twin = eager_experts(copy.deepcopy(model).double().eval())
    batch = doubled(batch)
    length = batch_length(batch, sequence=sequence)
    cut = Cut(length=length, ranks=ranks)
    weigh = _Weigh(cut=cut)

    tensors = [*twin.parameters(), *twin.buffers()]

    def one(over: Exchange) -> _Ran:
        mirror = copy.deepcopy(twin, {id(tensor): tensor for tensor in tensors})  # its own hooks, the same weights
        placed = ContextParallel(model=mirror, sequence=sequence, over=over, own_loss=own_loss)
        part = placed.cut(batch)
        mine = part.data
        with placed.forward(part), InDouble(), _watched(mirror) as seen:
            output = forward(mirror, mine)
        return _ran(mirror, output, mine, loss, weigh, rank=over.rank, size=over.size, seen=seen)

    with traceless(model, parameters=False):  # what a copy does not copy: generators, and what its hooks write to
        alone = play(one, size=1)[0]
        parts: list[_Ran] = play(one, size=ranks)
    _compare(alone, parts, cut=cut, names=[name for name, _ in twin.named_parameters()])


class _Weigh:
    """One number from outputs, each element with a weight of its own: its gradient sees them all."""

    def __init__(self, *, cut: Cut) -> None:
        self._cut = cut

    def __call__(self, outputs: Sequence[Tensor], *, rank: int, size: int) -> Tensor:
        total = outputs[0].new_zeros(())
        held = self._cut.size(rank) if size > 1 else self._cut.length
        for output in outputs:
            dim = _dim(output, held)
            if dim is None or not output.requires_grad:
                continue
            shape = [self._cut.length if d == dim else n for d, n in enumerate(output.shape)]
            weights = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            mine = self._cut.take(weights, dim=dim, rank=rank) if size > 1 else weights
            total = total + (output * mine.to(output.device)).sum()
        return total


def _ran(
    model: nn.Module, output: Any, batch: Any, loss: Any, weigh: _Weigh, *, rank: int, size: int, seen: Any
) -> _Ran:
    outputs = [t for t in tensors_of(output) if t.is_floating_point() and t.dim() > 1]
    found = loss(output, batch) if loss is not None else {}
    if isinstance(found, Tensor):
        raise LayoutError(
            "the loss is one number, a mean over its samples: parts of a sequence do not add up to it.",
            cause="each rank has some of a sample's positions, and a mean of means is another one",
            hint="loss -> (loss_sum, count), as in F.cross_entropy(..., reduction='sum'), targets.numel()",
        )
    pairs = found if isinstance(found, Mapping) else {"loss": found} if isinstance(found, tuple) else {}
    terms = [torch.as_tensor(value, dtype=torch.float64) for pair in pairs.values() for value in pair]
    target = weigh(outputs, rank=rank, size=size)
    target = target + sum((term for term in terms[::2]), target.new_zeros(()))
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not target.requires_grad:
        raise LayoutError(
            "no output of this model has the sequence in one of its dimensions.",
            cause="a pooled output (a classifier, an embedding) needs every position at once",
            hint="leave cp out",
        )
    gradients = torch.autograd.grad(target, parameters, allow_unused=True)
    kept = {name: tensor.detach() for name, tensor in seen.items()}
    return _Ran(
        outputs=[o.detach() for o in outputs], terms=[t.detach() for t in terms], gradients=list(gradients), seen=kept
    )


def _compare(alone: _Ran, parts: Sequence[_Ran], *, cut: Cut, names: Sequence[str]) -> None:
    for number, whole in enumerate(alone.outputs):
        if not _same(whole, [part.outputs[number] for part in parts], cut):
            raise _different(_first_module(alone, parts, cut))
    for number, whole in enumerate(alone.terms):
        total = torch.stack([part.terms[number] for part in parts]).sum()
        if not near(total, whole):
            raise LayoutError(
                f"the loss over the parts adds up to {float(total):.6g}, over the whole it is {float(whole):.6g}.",
                cause="a loss that compares a position with its neighbour (logits[:, :-1] with labels[:, 1:]), "
                "or one that is a mean",
                hint="targets moved by one in the dataset: (ids[:-1], ids[1:]); and loss -> (sum, count)",
            )
    for name, number in zip(names, range(len(alone.gradients)), strict=False):
        wanted = alone.gradients[number]
        got = [part.gradients[number] for part in parts]
        given = [g for g in got if g is not None]
        if wanted is None and not given:
            continue
        total = torch.stack(given).sum(0) if given else torch.zeros(())
        if wanted is None or not near(total, wanted):
            raise LayoutError(
                f"the gradients of {name} from the parts of a sequence do not add up to that of the whole.",
                cause="its use is not position by position, though the outputs are equal",
                hint="leave cp out for this model",
            )


def _first_module(alone: _Ran, parts: Sequence[_Ran], cut: Cut) -> str:
    for name, whole in alone.seen.items():
        mine = [part.seen.get(name) for part in parts]
        if any(m is None for m in mine) or not _same(whole, [m for m in mine if m is not None], cut):
            return name
    return "the model's own forward, after its last module"


def _different(name: str) -> LayoutError:
    return LayoutError(
        f"cut along the sequence this model gives other outputs; the first that differs is {name}'s.",
        cause="it looks at several positions (attention by matmul and softmax, a shift, a sum over the sequence) or "
        "counts positions itself",
        hint="F.scaled_dot_product_attention in it (transformers: attn_implementation='sdpa'), positions from "
        "torch.arange(x.shape[1]), or position_ids in the batch; or leave cp out",
    )


def _same(whole: Tensor, parts: Sequence[Tensor], cut: Cut) -> bool:
    """Joined where it has the sequence; every rank's equal where it has not."""
    dims = [_dim(part, cut.size(rank)) for rank, part in enumerate(parts)]
    dim = _dim(whole, cut.length)
    if dim is not None and all(d == dim for d in dims):
        return near(cut.join(parts, dim=dim), whole)
    return all(part.shape == whole.shape and near(part, whole) for part in parts)


def _dim(tensor: Tensor, size: int) -> int | None:
    """Where the sequence is: usually the second dimension."""
    order = [d for d in (1, *range(tensor.dim())) if d < tensor.dim()]
    return next((d for d in order if tensor.shape[d] == size), None)


def eager_experts(model: nn.Module) -> nn.Module:
    """Experts of transformers in plain products: torch's grouped product has no float64."""
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")
    return model


def near(found: Tensor, wanted: Tensor) -> bool:
    """Whether they differ by rounding in float64 only, for tensors of this size."""
    if found.shape != wanted.shape:
        return False
    scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, 1e-6)
    return bool(((found - wanted).abs() <= CLOSE * scale).all())


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors of an output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The last output of each module that has no modules of its own, by name and class, in the order of the forward."""
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


def doubled(value: Any) -> Any:
    """A batch with its floats in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: doubled(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(doubled(item) for item in value)
    return value
