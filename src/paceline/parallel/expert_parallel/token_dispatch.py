"""Dispatch of tokens to the ranks of their experts, and return of the results, by all-to-all with uneven counts.

Each pair of a token and one of its experts is a row. Rows are ordered by expert. A first all-to-all exchanges the
counts, so that each rank knows how many rows (perhaps none) it gets from each other rank. Backward sends the gradients
of rows in the opposite direction (Lepikhin et al., "GShard", 2020; uneven counts: Gale et al., "MegaBlocks", 2022).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from paceline.comm.process_group import World


@dataclass(frozen=True, kw_only=True)
class TokenRoute:
    """The routing of rows in one forward: how many rows go to and come from each rank, and the indices of the rows."""

    world: World
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    token_index: Tensor  # the token of each sent row; rows are ordered by expert
    pair_index: Tensor  # the index of each sent row in the flattened (tokens, choices)
    expert_index: Tensor  # the expert of each received row; the first expert of this rank is 0


def plan_route(index: Tensor, *, ranges: Sequence[tuple[int, int]], world: World) -> TokenRoute:
    """Return the route of the tokens. A collective call.

    `index`, of shape (tokens, choices), is the chosen experts. `ranges` is each rank's range of experts. A choice
    outside of all ranges (a masked expert) is not sent.
    """
    num_experts = ranges[-1][1]
    flat_index = index.reshape(-1)
    order = torch.argsort(flat_index, stable=True)
    order = order[(flat_index[order] >= 0) & (flat_index[order] < num_experts)]
    counts = torch.bincount(flat_index[order], minlength=num_experts)
    num_local = ranges[world.rank][1] - ranges[world.rank][0]
    experts_per_rank = [stop - start for start, stop in ranges]
    received = world.all_to_all(counts, send=experts_per_rank, receive=[num_local] * world.world_size)
    received = received.view(world.world_size, num_local)
    if world.is_simulated:
        received = _most_loaded_counts(received)
    send_counts = tuple(int(part.sum()) for part in counts.cpu().split(experts_per_rank))
    receive_counts = tuple(int(row.sum()) for row in received.cpu())
    local_experts = torch.arange(num_local, device=index.device).repeat(world.world_size)
    return TokenRoute(
        world=world,
        send_counts=send_counts,
        receive_counts=receive_counts,
        token_index=order // index.shape[-1],
        pair_index=order,
        expert_index=local_experts.repeat_interleave(received.reshape(-1)),
    )


def _most_loaded_counts(received: Tensor) -> Tensor:
    """Increase the received counts of a simulated step to an estimate for the most loaded rank.

    If `World.is_simulated` is True, tensors have no values, and all experts get equally many tokens. A real router does
    not distribute tokens so evenly. The estimate is two standard deviations above the mean number of rows that a rank
    receives if the router sends each choice to a random rank.
    """
    total = int(received.sum())
    margin = 2 * (max(total, 1) * (1 - 1 / received.shape[0])) ** 0.5 / max(total, 1)
    estimated: Tensor = received + (received * margin).round().to(received.dtype)
    return estimated


def dispatch(tokens: Tensor, weights: Tensor, *, route: TokenRoute) -> tuple[Tensor, Tensor]:
    """Send tokens and weights to the ranks of their experts; return the rows and weights of this rank's experts."""
    return _AllToAll.apply(route, False, tokens[route.token_index], weights.reshape(-1)[route.pair_index])  # type: ignore[no-untyped-call,no-any-return]


def combine(rows: Tensor, *, like: Tensor, route: TokenRoute) -> Tensor:
    """Send the rows back to the ranks of their tokens; return each token's sum of rows, added in order of experts.

    `like` gives the shape and dtype of the result.
    """
    (received,) = _AllToAll.apply(route, True, rows)  # type: ignore[no-untyped-call]
    return torch.zeros_like(like).index_add(0, route.token_index, received.to(like.dtype))


class _AllToAll(torch.autograd.Function):
    """An all-to-all of the rows of several tensors, in one autograd node: backward has one order on all ranks.

    `is_return` is True for rows that go back to the ranks of their tokens.
    """

    @staticmethod
    @override
    def forward(ctx: Any, route: TokenRoute, is_return: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.is_return = route, is_return
        return _exchange_rows(tensors, route, is_return=is_return)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *_exchange_rows(grads, ctx.route, is_return=not ctx.is_return)


def _exchange_rows(tensors: Sequence[Tensor], route: TokenRoute, *, is_return: bool) -> tuple[Tensor, ...]:
    send, receive = route.send_counts, route.receive_counts
    if is_return:
        send, receive = receive, send
    return tuple(route.world.all_to_all(tensor, send=send, receive=receive) for tensor in tensors)
