"""Data parallelism: the gradients of all replicas added while backward still runs.

The model stays the user's own module: no wrapper, no new names. Each parameter's hook says when its gradient
is ready; a unit whose gradients are all ready is reduced at once (Li et al., "PyTorch Distributed", VLDB 2020).
Gradients are *added*, never averaged: the step divides by the global counts.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.errors import RunError
from paceline.parallel.module_access.parameters import NamedParameter, make_buckets, renumber_parameters
from paceline.torch_internals.private_api import copy_all, divide_all


class Reducer(Protocol):
    """What turns the gradients of this process's microbatches into those of the global batch."""

    @property
    def meets(self) -> bool:
        """Whether forward or backward waits for the other replicas', so that all must run equally many."""

    def begin(self) -> None:
        """Forget the last step's gradients."""

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """A microbatch is about to run backward, the `last` of this replica's in the step, or one for nothing."""

    def after_backward(self) -> None:
        """A microbatch has run backward."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Leave the global gradient, divided, in every `.grad`; False if the step must be run again."""

    def close(self) -> None:
        """Remove the hooks."""


class LocalReducer:
    """One process: the gradients are already everybody's."""

    meets = False

    def __init__(self, *, named: Sequence[NamedParameter]) -> None:
        self._parameters = [member.parameter for member in named]

    def begin(self) -> None:
        """Forget the last step's gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """Nothing to prepare."""

    def after_backward(self) -> None:
        """Nothing to collect: autograd has added to `.grad`."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Divide."""
        if divisor is not None:
            divide_all([p.grad for p in self._parameters if p.grad is not None], divisor)
        return True

    def close(self) -> None:
        """Nothing to remove."""


class Unit(Protocol):
    """Gradients that are reduced together, by one message or two; the last of a model's has flags."""

    members: list[NamedParameter]
    ready: int
    wait: Callable[[], object] | None
    flags: Tensor | None

    def sent_bytes(self, ranks: int) -> float:
        """What leaves a rank for it."""

    def forget(self) -> None:
        """Begin anew; what is still under way, of a step that was dropped, is waited for."""

    def launch(self, world: World) -> None:
        """Take the gradients and start the first message."""

    def pass_on(self) -> None:
        """Once it is here, start the second, where there are two and it is not sent already."""

    def land(self, divisor: float | Tensor | None) -> None:
        """Wait for the sums and leave them, divided, in every `.grad`."""


class _Unit:
    """Gradients that are reduced together. A single large one is reduced where it lies, without a copy.

    The last unit carries `num_flags` more numbers: which parameters got a gradient on this rank.
    """

    def __init__(self, members: Sequence[NamedParameter], *, num_flags: int = 0) -> None:
        self.members = list(members)
        self.parameters = [member.parameter for member in members]
        self.ready = 0
        self.wait: Callable[[], object] | None = None
        self.landed = False
        self.flat: Tensor | None = None
        self.views: list[Tensor] = []
        self.flags: Tensor | None = None
        if len(members) > 1 or num_flags:
            first = self.parameters[0]
            sizes = [p.numel() for p in self.parameters]
            self.flat = torch.empty(sum(sizes) + num_flags, dtype=first.dtype, device=first.device)
            *parts, self.flags = self.flat.split([*sizes, num_flags])
            self.views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def sent_bytes(self, ranks: int) -> float:
        """Those of a ring."""
        flags = 0 if self.flags is None else self.flags.nbytes
        return 2 * (ranks - 1) / ranks * (sum(p.nbytes for p in self.parameters) + flags)

    def launch(self, world: World) -> None:
        self.wait = world.start_all_reduce(self._payload())

    def pass_on(self) -> None:
        """There is one message."""

    def _payload(self) -> Tensor:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        if self.flat is None:
            only = self.parameters[0]
            only.grad = grads[0].contiguous()
            return only.grad
        copy_all(self.views, grads)
        for parameter in self.parameters:
            parameter.grad = None
        return self.flat

    def forget(self) -> None:
        """Begin anew; what is still under way, of a step that was dropped, is waited for."""
        if self.wait is not None and not self.landed:
            self.wait()
        self.ready, self.wait, self.landed = 0, None, False

    def land(self, divisor: float | Tensor | None) -> None:
        assert self.wait is not None
        self.wait()
        self.landed = True
        result = self.flat if self.flat is not None else self.parameters[0].grad
        assert result is not None
        if divisor is not None:
            result.div_(divisor)
        for parameter, view in zip(self.parameters, self.views, strict=False):
            parameter.grad = view


class BucketReducer:
    """Adds the gradients of all ranks, overlapped with backward. `unit` makes what carries them."""

    meets = False

    def __init__(self, *, named: Sequence[NamedParameter], world: World, unit: Callable[..., Unit] = _Unit) -> None:
        self._world = world
        self._named = named = renumber_parameters(named)
        units = make_buckets(named)  # none of a stage in which all is frozen
        self._units = [unit(members) for members in units[:-1]]
        self._units += [unit(last, num_flags=len(named)) for last in units[-1:]]
        self._touched = [False] * len(named)
        self._armed = False
        self._next = 0
        self._handles = [
            member.parameter.register_post_accumulate_grad_hook(self._hook(unit, member))
            for unit in self._units
            for member in unit.members
        ]

    def sent_bytes(self, ranks: int) -> float:
        """What leaves a rank in a step."""
        return sum(unit.sent_bytes(ranks) for unit in self._units)

    def begin(self) -> None:
        """Forget the last step's gradients."""
        for member in self._named:
            member.parameter.grad = None
        for unit in self._units:
            unit.forget()
        self._touched = [False] * len(self._named)
        self._armed = False
        self._next = 0

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """Before the last microbatch gradients only add up locally."""
        self._armed = last

    def after_backward(self) -> None:
        """Nothing to collect: the hooks have."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Send what backward did not reach, wait for all, divide."""
        while self._next < len(self._units):
            self._launch_next()
        for unit in self._units:
            unit.pass_on()
        for unit in self._units:
            unit.land(divisor)
        flags = self._units[-1].flags if self._units else None
        for member in self._named:
            assert flags is not None
            if not self._touched[member.index] and not flags[member.index]:
                member.parameter.grad = None
        return True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, unit: Unit, member: NamedParameter) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            self._touched[member.index] = True
            if not self._armed:
                return
            if unit.wait is not None:
                raise second_gradient(member.name)
            unit.ready += 1
            while self._next < len(self._units) and self._is_full(self._units[self._next]):
                self._launch_next()

        return ready

    @staticmethod
    def _is_full(unit: Unit) -> bool:
        return unit.ready == len(unit.members)

    def _launch_next(self) -> None:
        unit = self._units[self._next]
        if unit is self._units[-1] and unit.flags is not None:
            unit.flags.fill_(1.0)
            absent = [member.index for member in self._named if not self._touched[member.index]]
            if absent:
                unit.flags[absent] = 0.0
        if self._next > 1:  # while backward goes on, and in the same place on every rank
            self._units[self._next - 2].pass_on()
        unit.launch(self._world)
        self._next += 1


def second_gradient(name: str) -> RunError:
    """What to say where a parameter's gradient comes after its sum has left."""
    return RunError(
        f"{name} got a second gradient after its sum was already sent.",
        cause="the graph was run backward twice, or by reentrant checkpointing",
        hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )


def unused_parameters_note(named: Sequence[NamedParameter]) -> str:
    """What to say of the parameters that got no gradient on any rank; nothing where all did."""
    names = [member.name for member in named if member.parameter.grad is None]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"no gradient reached {', '.join(names[:3])}{more} in the first step: not used by the loss, or behind a "
        f"detach(). They keep their start values; requires_grad_(False) says that it is meant"
    )
