"""Parameters that several stages hold: the gradient of each is the sum over these stages, of floats or of integers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.module_access.parameters import NamedParameter

_TAG = 1 << 20


class ExactTies:
    """What exact mode adds over the stages: integers, so that the sum is that of one process."""

    def __init__(self, ties: Mapping[str, Sequence[int]], *, world: World) -> None:
        self._world = world
        self._of = {name: (place, ranks) for place, (name, ranks) in enumerate(sorted(ties.items()))}

    def added(self, name: str, own: Tensor) -> Tensor:
        """The sum over the ranks that hold it; all of them call it, for one after another in one order."""
        place, ranks = self._of.get(name, (0, ()))
        return sum_in_rank_order(own, ranks=ranks, place=place, world=self._world) if ranks else own


class TiedReducer:
    """Another reducer, after which the holders of a tied parameter add what each of them has of its gradient.

    `ties` gives the ranks of `world`, a pipeline's, that hold each. Terms are added in the order of ranks, so that
    all have the same bits.
    """

    def __init__(
        self, inner: Reducer, *, named: Sequence[NamedParameter], ties: Mapping[str, Sequence[int]], world: World
    ) -> None:
        self._inner = inner
        self._world = world
        mine = {member.name: member.parameter for member in named}
        places = [(place, name, ranks) for place, (name, ranks) in enumerate(sorted(ties.items()))]
        self._tied = [(place, mine[name], ranks) for place, name, ranks in places if name in mine]

    @property
    def meets(self) -> bool:
        """As without ties."""
        return self._inner.meets

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self._inner.begin()

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """As without ties."""
        self._inner.before_backward(last=last, counts=counts)

    def after_backward(self) -> None:
        """As without ties."""
        self._inner.after_backward()

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """The gradient of each stage is divided already: so is their sum."""
        if not self._inner.finish(divisor=divisor):
            return False
        for place, parameter, ranks in self._tied:
            parameter.grad = sum_tied_gradients(parameter, ranks=ranks, place=place, world=self._world)
        return True

    def close(self) -> None:
        """Remove the hooks."""
        self._inner.close()


def sum_tied_gradients(parameter: nn.Parameter, *, ranks: Sequence[int], place: int, world: World) -> Tensor | None:
    """The sum of its gradients on these ranks, in their order; None where none of them has one. All of them call it."""
    own = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype, device=parameter.device)
    if parameter.grad is not None:
        own[:-1] = parameter.grad.flatten()
        own[-1] = 1.0
    total = sum_in_rank_order(own, ranks=ranks, place=place, world=world)
    return total[:-1].view_as(parameter) if total[-1] > 0 else None


def sum_in_rank_order(own: Tensor, *, ranks: Sequence[int], place: int, world: World) -> Tensor:
    """The sum of what these ranks have, in their order, so that all have the same bits. All of them call it."""
    parts = {rank: own if rank == world.rank else torch.empty_like(own) for rank in ranks}
    others, tag = [rank for rank in ranks if rank != world.rank], _TAG + place
    works = [world.start_send(own, to=rank, tag=tag) for rank in others]
    works += [world.start_receive(parts[rank], source=rank, tag=tag) for rank in others]
    for work in works:
        work.wait()
    total = parts[ranks[0]].clone()
    for rank in ranks[1:]:
        total += parts[rank]
    return total
