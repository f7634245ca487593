"""A fragment: a set of parameters that sites synchronise together, by one step of the outer optimizer."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.update_rule import UpdateRule
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.tensor_access import copy_into, local_elements


class SiteGroup:
    """The ranks that hold the same shard in all sites, and the time that this rank has waited for them."""

    def __init__(self, peers: World) -> None:
        self.peers = peers
        self.waited_seconds = 0.0

    def wait(self, wait: Callable[[], object]) -> None:
        """Call `wait` and add its duration to `waited_seconds`."""
        start_time = time.perf_counter()
        wait()
        self.waited_seconds += time.perf_counter() - start_time

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor over the sites."""
        if not tensors:
            return []
        flat = _flat(tensors)
        self.wait(self.peers.start_all_reduce(flat))
        return _split_like(flat.div_(self.peers.world_size), tensors)


class Fragment:
    """A set of this rank's parameters that are synchronised together."""

    def __init__(self, members: Sequence[NamedParameter], *, rule: UpdateRule, link: SiteGroup) -> None:
        self.members = list(members)
        self.due: int | None = None
        self._rule = rule
        self._sites = link
        self._flat: Tensor | None = None
        self._wait: Callable[[], object] | None = None
        self.agreed: list[nn.Parameter] = []
        self.begin()

    @property
    def live(self) -> list[Tensor]:
        """The current weights, which the site trains."""
        return [local_elements(member.parameter.detach()) for member in self.members]

    def begin(self) -> None:
        """Take the current weights as the synchronised weights, and reset the outer optimizer."""
        self.agreed = [nn.Parameter(averaging_dtype_tensor(tensor).clone()) for tensor in self.live]
        momentum = self._rule.momentum
        self._outer = (
            torch.optim.SGD(self.agreed, lr=self._rule.lr, momentum=momentum, nesterov=momentum > 0.0)
            if self.agreed
            else None
        )
        self.due, self._flat, self._wait = None, None, None

    def send(self, step: int) -> None:
        """Start the all-reduce of the pseudo-gradient: synchronised minus current weights.

        Every rank sets `due_step`, even if its stage has no parameter of this fragment.
        """
        self.due = step + self._rule.delay
        if self.agreed:
            pairs = zip(self.agreed, self.live, strict=True)
            self._flat = _flat([agreed.detach() - averaging_dtype_tensor(live) for agreed, live in pairs])
            self._wait = self._sites.peers.start_all_reduce(self._flat)

    def arrive(self) -> None:
        """Wait for the all-reduce. `apply` uses the result when it is due."""
        if self._wait is not None:
            self._sites.wait(self._wait)
            self._wait = None

    def take(self) -> None:
        """Run the step of the outer optimizer on the mean pseudo-gradient of all sites."""
        self.arrive()
        if self._flat is not None and self._outer is not None:
            gradients = _split_like(self._flat / self._sites.peers.world_size, self.agreed)
            for parameter, gradient in zip(self.agreed, gradients, strict=True):
                parameter.grad = gradient
            self._outer.step()
            self._outer.zero_grad()
            self._update_weights()
        self.due, self._flat = None, None

    def _update_weights(self) -> None:
        local_fraction = self._rule.mix if self._rule.delay else 0.0
        with torch.no_grad():
            for live, agreed in zip(self.live, self.agreed, strict=True):
                copy_into(
                    live,
                    (averaging_dtype_tensor(live) * local_fraction + agreed * (1.0 - local_fraction))
                    if local_fraction
                    else agreed,
                )

    def saved(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the state that is equal on all sites, as (kind, FQN, this rank's part)."""
        self.arrive()
        pending_parts = [] if self._flat is None else _split_like(self._flat, self.agreed)
        for position, (member, parameter) in enumerate(zip(self.members, self.agreed, strict=True)):
            yield "agreed", member.name, parameter.detach()
            momentum = None if self._outer is None else self._outer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                yield "momentum", member.name, momentum
            if pending_parts:
                yield "coming", member.name, pending_parts[position]

    def restore(self, find: Callable[[str, str], Tensor | None], *, due: int | None) -> None:
        """Restore the saved state; `find(kind, name)` returns None for state that was not saved."""
        self.begin()
        pending_parts: list[Tensor] = []
        for member, parameter in zip(self.members, self.agreed, strict=True):
            saved = {what: find(what, member.name) for what in ("agreed", "momentum", "coming")}
            with torch.no_grad():
                parameter.copy_(parameter if saved["agreed"] is None else saved["agreed"])
            if saved["momentum"] is not None and self._outer is not None:
                self._outer.state[parameter]["momentum_buffer"] = saved["momentum"].to(parameter.device)
            pending = saved["coming"]
            pending_parts.append(torch.zeros_like(parameter) if pending is None else pending.to(parameter.device))
        self.due = due
        if pending_parts and due is not None:
            self._flat = _flat(pending_parts)


def averaging_dtype_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype in which means are computed, at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True)]
