"""Dispatch of tokens to the ranks that hold their experts, and return of the results: all-to-all with uneven counts.

Each (token, expert) pair is a row; rows are ordered by expert. A first all-to-all exchanges the counts, so that each
rank knows the number of rows from each other rank, which may be zero. Backward uses the reverse all-to-all (Lepikhin et
al., "GShard", 2020; uneven counts: Gale et al., "MegaBlocks", 2022).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World


@dataclass(frozen=True, kw_only=True)
class TokenRoute:
    """The routing of rows in one forward: the counts of rows per rank, and the indices of the rows."""

    world: World
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    token_index: Tensor  # the token of each sent row, in the order of experts
    pair_index: Tensor  # the index of each sent row among all (token, choice) pairs
    expert_index: Tensor  # the expert of each received row, counted from 0 on this rank


def plan_route(index: Tensor, *, ranges: Sequence[tuple[int, int]], world: World) -> TokenRoute:
    """Return the route for the chosen experts `index`, (tokens, choices), and the expert ranges of the ranks.

    A choice outside of all ranges (a masked expert) is not sent.
    """
    num_experts = ranges[-1][1]
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    order = order[(flat[order] >= 0) & (flat[order] < num_experts)]
    counts = torch.bincount(flat[order], minlength=num_experts)
    mine = ranges[world.rank][1] - ranges[world.rank][0]
    held = [stop - start for start, stop in ranges]
    came = world.all_to_all(counts, send=held, receive=[mine] * world.world_size).view(world.world_size, mine)
    if world.is_simulated:
        came = _most_loaded_counts(came)
    send = tuple(int(part.sum()) for part in counts.cpu().split(held))
    receive = tuple(int(row.sum()) for row in came.cpu())
    local = torch.arange(mine, device=index.device).repeat(world.world_size)
    return TokenRoute(
        world=world,
        send_counts=send,
        receive_counts=receive,
        token_index=order // index.shape[-1],
        pair_index=order,
        expert_index=local.repeat_interleave(came.reshape(-1)),
    )


def _most_loaded_counts(came: Tensor) -> Tensor:
    """Return estimated counts for the most loaded rank, for a simulation without a real router.

    The estimate is two standard deviations above the mean, if each choice is equally likely to be on any rank.
    """
    total = int(came.sum())
    more = 2 * (max(total, 1) * (1 - 1 / came.shape[0])) ** 0.5 / max(total, 1)
    found: Tensor = came + (came * more).round().to(came.dtype)
    return found


def dispatch(tokens: Tensor, weights: Tensor, *, route: TokenRoute) -> tuple[Tensor, Tensor]:
    """Return the rows and weights of this rank's experts, from the tokens of all ranks."""
    return _AllToAll.apply(route, False, tokens[route.token_index], weights.reshape(-1)[route.pair_index])  # type: ignore[no-untyped-call,no-any-return]


def combine(rows: Tensor, *, like: Tensor, route: TokenRoute) -> Tensor:
    """Return the rows to their ranks, and add the rows of each token, in the order of experts."""
    (came,) = _AllToAll.apply(route, True, rows)  # type: ignore[no-untyped-call]
    return torch.zeros_like(like).index_add(0, route.token_index, came.to(like.dtype))


class _AllToAll(torch.autograd.Function):
    """An all-to-all of rows; one autograd node for all tensors, so that backward has the same order on every rank."""

    @staticmethod
    def forward(ctx: Any, route: TokenRoute, home: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.home = route, home
        return _exchange_rows(tensors, route, is_return=home)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *_exchange_rows(grads, ctx.route, is_return=not ctx.home)


def _exchange_rows(tensors: Sequence[Tensor], route: TokenRoute, *, is_return: bool) -> tuple[Tensor, ...]:
    send, receive = (
        (route.receive_counts, route.send_counts) if is_return else (route.send_counts, route.receive_counts)
    )
    return tuple(route.world.all_to_all(tensor, send=send, receive=receive) for tensor in tensors)
