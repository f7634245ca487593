"""A loss over the whole global batch, as contrastive losses are: every replica sees all outputs, its own ones live.

The gradient of such a loss is the sum, over replicas, of what flows back through each one's own outputs. So outputs
are gathered as values, each replica puts its own, which autograd knows, in their place, and computes the same loss; the
usual sum of gradients over replicas does the rest, and nothing is sent back.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.errors import JobError
from paceline.nested import leaves, rebuilt
from paceline.step.loss import Terms
from paceline.world import World

Told = list[tuple[list[int], str]]


def gather(mine: Any, *, world: World, num_samples: int) -> Any:
    """`mine` with the rows of every tensor joined over replicas, in the order of ranks; None where `mine` is None.

    Every replica calls this. A tensor without dimensions, such as a temperature, is everybody's: its gradient is
    divided by the number of replicas that have samples.

    Raises:
        JobError: a tensor whose first dimension is not the samples, or whose other dimensions differ between replicas.
    """
    own = [] if mine is None else list(leaves(mine))
    told: list[Told | None] = world.gather_json(None if mine is None else [(list(t.shape), str(t.dtype)) for t in own])
    present = [each for each in told if each is not None]
    _check(present, own, num_samples)
    joined = []
    for place, (shape, kind) in enumerate(present[0]):
        tensor = own[place] if own else None
        if not shape:
            joined.append(tensor if tensor is None else shared(tensor, among=len(present)))
            continue
        rows = [0 if each is None else each[place][0][0] for each in told]
        joined.append(_joined(tensor, rows, shape[1:], getattr(torch, kind.removeprefix("torch.")), world))
    return None if mine is None else rebuilt(mine, iter(joined))


def shared(tensor: Tensor, *, among: int) -> Tensor:
    """The same value, of whose gradient each of `among` replicas has its part."""
    return tensor.detach() + (tensor - tensor.detach()) / among if tensor.requires_grad else tensor


def quotients(terms: Terms) -> Tensor:
    """What backward runs on: counts of the whole batch are known, so each term is divided here."""
    return torch.stack([total / count for total, count in terms.values()]).sum()


def _joined(own: Tensor | None, rows: list[int], rest: list[int], dtype: torch.dtype, world: World) -> Tensor | None:
    """Each replica writes its rows into zeros, and all are added: exact, and one call for replicas without rows too."""
    start = sum(rows[: world.rank])
    sent = torch.uint8 if dtype is torch.bool else dtype
    whole = torch.zeros([sum(rows), *rest], dtype=sent, device=world.device)
    if own is not None:
        whole[start : start + len(own)] = own.detach().to(sent)
    whole = world.all_reduce(whole).to(dtype)
    if own is None or not own.requires_grad:
        return whole
    return torch.cat([whole[:start], own, whole[start + len(own) :]])


def _check(present: list[Told], own: list[Tensor], num_samples: int) -> None:
    odd = next((tensor for tensor in own if tensor.dim() and len(tensor) != num_samples), None)
    if odd is not None:
        raise JobError(
            f'loss_over="batch" joins outputs and batch along their first dimension, but one of shape '
            f"{tuple(odd.shape)} came with {num_samples} samples.",
            hint="forward=lambda model, batch: tensors of shape [samples, ...], or without dimensions",
        )
    kinds = {repr([(shape[1:], bool(shape), kind) for shape, kind in told]) for told in present}
    if len(kinds) > 1:
        raise JobError(
            "loss_over=\"batch\": the replicas' outputs or batches have other shapes or types, and can't be joined.",
            cause="padding to the longest sample of each microbatch",
            hint="pad to one length in collate=",
        )
