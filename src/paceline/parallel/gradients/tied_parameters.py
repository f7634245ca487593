"""Sum the gradients of tied parameters over the pipeline stages that hold them, in floating point or as integers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.module_access.parameters import NamedParameter

_TAG = 1 << 20  # the first message tag of tied gradients; activations use lower tags


class ExactTies:
    """The summation of tied gradients over pipeline stages in exact mode, as integers, as in one process.

    `ties` maps the name of each tied parameter to the ranks of the pipeline group `world` that hold it.
    """

    def __init__(self, ties: Mapping[str, Sequence[int]], *, world: World) -> None:
        self._world = world
        self._holders = {name: (index, ranks) for index, (name, ranks) in enumerate(sorted(ties.items()))}

    def sum_over_stages(self, name: str, local_sum: Tensor) -> Tensor:
        """Return the sum over the ranks that hold the parameter; they call this in the same order of parameters."""
        index, ranks = self._holders.get(name, (0, ()))
        return sum_in_rank_order(local_sum, ranks=ranks, index=index, world=self._world) if ranks else local_sum


class TiedReducer:
    """A reducer that runs an inner reducer and then sums each tied parameter's gradient over the stages that hold it.

    `ties` gives for each tied parameter the ranks of the pipeline group `world` that hold it. Terms are added in rank
    order, so that all ranks get the same bits.
    """

    def __init__(
        self,
        inner: Reducer,
        *,
        named_parameters: Sequence[NamedParameter],
        ties: Mapping[str, Sequence[int]],
        world: World,
    ) -> None:
        self._inner = inner
        self._world = world
        local_parameters = {member.name: member.parameter for member in named_parameters}
        self._tied = [
            (index, local_parameters[name], ranks)
            for index, (name, ranks) in enumerate(sorted(ties.items()))
            if name in local_parameters
        ]

    @property
    def needs_equal_microbatches(self) -> bool:
        """Return the inner reducer's `needs_equal_microbatches`."""
        return self._inner.needs_equal_microbatches

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        self._inner.begin()

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Prepare the inner reducer for a microbatch's backward."""
        self._inner.before_backward(last=last, has_samples=has_samples)

    def after_backward(self) -> None:
        """Collect gradients in the inner reducer."""
        self._inner.after_backward()

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Finish the inner reducer, which divides each stage's gradient, then sum the tied gradients over stages."""
        if not self._inner.finish(divisor=divisor):
            return False
        for index, parameter, ranks in self._tied:
            parameter.grad = sum_tied_gradients(parameter, ranks=ranks, index=index, world=self._world)
        return True

    def close(self) -> None:
        """Remove the gradient hooks."""
        self._inner.close()


def sum_tied_gradients(parameter: nn.Parameter, *, ranks: Sequence[int], index: int, world: World) -> Tensor | None:
    """Return the sum of a gradient over `ranks`, added in that order; None if no rank has one. All `ranks` call it."""
    local_gradient = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype, device=parameter.device)
    if parameter.grad is not None:
        local_gradient[:-1] = parameter.grad.flatten()
        local_gradient[-1] = 1.0
    total = sum_in_rank_order(local_gradient, ranks=ranks, index=index, world=world)
    return total[:-1].view_as(parameter) if total[-1] > 0 else None


def sum_in_rank_order(local_tensor: Tensor, *, ranks: Sequence[int], index: int, world: World) -> Tensor:
    """Return the sum over `ranks`, added in that order so that all get the same bits. All `ranks` call this."""
    tensors = {rank: local_tensor if rank == world.rank else torch.empty_like(local_tensor) for rank in ranks}
    peers, tag = [rank for rank in ranks if rank != world.rank], _TAG + index
    works = [world.start_send(local_tensor, to=rank, tag=tag) for rank in peers]
    works += [world.start_receive(tensors[rank], source=rank, tag=tag) for rank in peers]
    for work in works:
        work.wait()
    total = tensors[ranks[0]].clone()
    for rank in ranks[1:]:
        total += tensors[rank]
    return total
