"""Does this model give the same when its experts are spread? Asked before anything is started, in one process.

As for `cp`, threads play the ranks, in float64. What it finds: a forward that counts its experts in another way, drops
tokens beyond a capacity, or mixes the tokens that it is given.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.nested import leaves
from paceline.place.context.alike import near
from paceline.place.context.check import InDouble, doubled, eager_experts
from paceline.place.exchange import Exchange, play
from paceline.place.experts.spread import split_experts
from paceline.place.parts import Part
from paceline.place.traceless import traceless


def check_experts(
    *,
    model: nn.Module,
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    experts: str | None = None,
) -> None:
    """Run `forward(model, batch)` of a batch for each rank, whole and with the experts spread over as many ranks.

    Raises:
        LayoutError: they can't be spread, or outputs or gradients differ.
    """
    twin = eager_experts(copy.deepcopy(model).double().eval())
    data = [doubled(batch) for batch in batches]
    with traceless(model, parameters=False):
        whole = [_run(twin, batch, forward) for batch in data]
    names = [name for name, parameter in twin.named_parameters() if parameter.requires_grad]
    wanted = {name: _sum([found[1].get(name) for found in whole]) for name in names}

    def one(over: Exchange) -> tuple[list[Tensor], dict[str, Tensor | None], dict[str, Part], tuple[str, ...]]:
        mine = copy.deepcopy(twin)
        placed = split_experts(model=mine, over=over, experts=experts)
        return *_run(mine, data[over.rank], forward), dict(placed.parts), placed.modules

    with traceless(model, parameters=False):
        ranks = play(one, size=len(data))
    modules = ", ".join(ranks[0][3])
    for (outputs, _), found in zip(whole, ranks, strict=True):
        if not all(near(a, b) for a, b in zip(found[0], outputs, strict=True)):
            raise _different("outputs", modules)
    for name, right in wanted.items():
        if not _gradient_fits(name, right, ranks):
            raise _different(f"gradients of {name}", modules)


def _run(model: nn.Module, batch: Any, forward: Any) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    with InDouble():
        outputs = [t for t in leaves(forward(model, batch)) if t.is_floating_point() and t.requires_grad]
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    weights = [torch.linspace(-1.0, 1.0, t.numel(), dtype=t.dtype, device=t.device).view(t.shape) for t in outputs]
    total = torch.stack([(t * w).sum() for t, w in zip(outputs, weights, strict=True)]).sum()
    gradients = torch.autograd.grad(total, [parameter for _, parameter in named], allow_unused=True)
    return [t.detach() for t in outputs], dict(zip([name for name, _ in named], gradients, strict=True))


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.stack(there).sum(0) if there else None


def _gradient_fits(name: str, right: Tensor | None, ranks: Sequence[Any]) -> bool:
    if name not in ranks[0][2]:
        total = _sum([found[1].get(name) for found in ranks])
        return (total is None) == (right is None) and (total is None or right is None or near(total, right))
    for _, gradients, parts, _ in ranks:
        mine = gradients.get(name)
        if parts[name].local is not None and (mine is None) != (right is None):
            return False
        if mine is not None and right is not None and not near(mine, parts[name].take(right)):
            return False
    return True


def _different(what: str, modules: str) -> LayoutError:
    return LayoutError(
        f"with the experts of {modules} spread over ranks the model's {what} are others.",
        cause="their forward looks at more than one token at a time (a capacity, a statistic), or counts its experts "
        "by something else than its parameters",
        hint="out[token] = sum over choices of weight * expert(token), and nothing else, in that forward; or no ep",
    )
