"""Gradients of which a part is sent and the rest held back until the next step (error feedback).

What is held back is in units of the mean gradient, so that it counts the same beside a batch of another count (Stich
et al., "Sparsified SGD with memory", 2018; Karimireddy et al., "Error feedback fixes SignSGD", 2019). The count is
known when backward has ended: nothing is sent before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.compression.residual_memory import ResidualBuffers
from paceline.parallel.module_access.parameters import NamedParameter, make_buckets, renumber_parameters
from paceline.torch_internals.private_api import divide_all


class HeldUnit(Protocol):
    """Parameters whose parts cross together, by one message or two; `errors` are what they hold back."""

    errors: ResidualBuffers

    @property
    def memories(self) -> tuple[ResidualBuffers, ...]:
        """All that it keeps from step to step."""

    def sent_bytes(self, ranks: int) -> float:
        """What leaves a rank for it."""

    def launch(self, world: World) -> None:
        """Choose, and start the first message."""

    def pass_on(self) -> None:
        """Once it is here, start the second, where there are two."""

    def land(self) -> Tensor:
        """Leave the sum in every `.grad`; a float64 that is finite where all of them are, also where float32 ends."""


class ErrorFeedbackReducer:
    """Adds what the ranks send of their gradients, each with its own memory of what it has not sent."""

    meets = False

    def __init__(
        self,
        *,
        named: Sequence[NamedParameter],
        world: World,
        unit: Callable[[Sequence[NamedParameter]], HeldUnit],
        replica: int,
    ) -> None:
        self.replica = replica
        self.replicas = world.world_size
        self._world = world
        self._named = renumber_parameters(named)
        self._units = [unit(members) for members in make_buckets(self._named)]

    def sent_bytes(self, ranks: int) -> float:
        """What leaves a rank in a step."""
        return sum(unit.sent_bytes(ranks) for unit in self._units) + 2 * (ranks - 1) / ranks * len(self._named)

    def begin(self) -> None:
        """Forget the last step's gradients."""
        for member in self._named:
            member.parameter.grad = None

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """Nothing to prepare."""

    def after_backward(self) -> None:
        """Nothing to collect: autograd has added to `.grad`."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Divide, send, add; a step whose gradient is not finite leaves what is held back as it was."""
        grads = [member.parameter.grad for member in self._named]
        flags = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8, device=self._world.device)
        flagged = self._world.start_all_reduce(flags, op="max")
        if divisor is not None:
            divide_all([grad for grad in grads if grad is not None], divisor)
        for unit in self._units:
            unit.launch(self._world)
        for unit in self._units:
            unit.pass_on()
        ok = torch.isfinite(torch.stack([unit.land() for unit in self._units]).sum())
        flagged()
        missing = [member for member, grad in zip(self._named, grads, strict=True) if grad is None]
        absent = [member for member in missing if not flags[member.index]]
        for member in absent:
            member.parameter.grad = None
        for memory in self._memories():
            memory.settle(ok=ok, absent=[member.name for member in absent])
        return True

    def undo(self) -> None:
        """The step was not taken: what was held back before it is so again."""
        for memory in self._memories():
            memory.undo()

    def close(self) -> None:
        """Nothing to remove."""

    @property
    def errors(self) -> Mapping[str, Tensor]:
        """What this replica holds back, by FQN."""
        return {name: tensor for unit in self._units for name, tensor in unit.errors.now.items()}

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """What else is kept from step to step, the same on every replica."""
        others = [memory for unit in self._units for memory in unit.memories if memory is not unit.errors]
        return {name: tensor for memory in others for name, tensor in memory.now.items()}

    def _memories(self) -> Iterator[ResidualBuffers]:
        for unit in self._units:
            yield from unit.memories
