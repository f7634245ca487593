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
    """The ranks that hold the same shard, one in each site, and the time that this rank has waited for them."""

    def __init__(self, peers: World) -> None:
        self.peers = peers
        self.waited_seconds = 0.0

    def wait_timed(self, wait: Callable[[], object]) -> None:
        """Call `wait` and add its duration to `waited_seconds`."""
        start_time = time.perf_counter()
        wait()
        self.waited_seconds += time.perf_counter() - start_time

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor over the sites."""
        if not tensors:
            return []
        flat = _flatten(tensors)
        self.wait_timed(self.peers.start_all_reduce(flat))
        return _split_like(flat.div_(self.peers.world_size), tensors)


class Fragment:
    """A set of this rank's parameters that are synchronised together.

    `synchronized` are copies of the weights as of the last synchronisation, equal on all sites. `due_step` is the step
    at which the pseudo-gradient in flight is applied, or None.
    """

    def __init__(self, members: Sequence[NamedParameter], *, rule: UpdateRule, sites: SiteGroup) -> None:
        self.members = list(members)
        self.due_step: int | None = None
        self._rule = rule
        self._sites = sites
        self._pending_gradient: Tensor | None = None
        self._wait: Callable[[], object] | None = None
        self.synchronized: list[nn.Parameter] = []
        self.reset()

    @property
    def weights(self) -> list[Tensor]:
        """The current weights, which the site trains."""
        return [local_elements(member.parameter.detach()) for member in self.members]

    def reset(self) -> None:
        """Copy the current weights into the synchronised weights, and reset the outer optimizer."""
        self.synchronized = [nn.Parameter(to_averaging_dtype(tensor).clone()) for tensor in self.weights]
        momentum = self._rule.momentum
        self._optimizer = (
            torch.optim.SGD(self.synchronized, lr=self._rule.lr, momentum=momentum, nesterov=momentum > 0.0)
            if self.synchronized
            else None
        )
        self.due_step, self._pending_gradient, self._wait = None, None, None

    def send(self, step: int) -> None:
        """Start the all-reduce of the pseudo-gradient: synchronised minus current weights.

        Every rank sets `due_step`, even if its stage has no parameter of this fragment.
        """
        self.due_step = step + self._rule.delay
        if self.synchronized:
            pairs = zip(self.synchronized, self.weights, strict=True)
            self._pending_gradient = _flatten(
                [synchronized.detach() - to_averaging_dtype(current) for synchronized, current in pairs]
            )
            self._wait = self._sites.peers.start_all_reduce(self._pending_gradient)

    def wait(self) -> None:
        """Wait for the all-reduce, but leave its result for `apply`."""
        if self._wait is not None:
            self._sites.wait_timed(self._wait)
            self._wait = None

    def apply(self) -> None:
        """Run the step of the outer optimizer on the mean pseudo-gradient of all sites."""
        self.wait()
        if self._pending_gradient is not None and self._optimizer is not None:
            gradients = _split_like(self._pending_gradient / self._sites.peers.world_size, self.synchronized)
            for parameter, gradient in zip(self.synchronized, gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._update_weights()
        self.due_step, self._pending_gradient = None, None

    def _update_weights(self) -> None:
        """Copy the synchronised weights into the model. After a delay, mix a fraction of the site's weights in."""
        local_fraction = self._rule.mix if self._rule.delay else 0.0
        with torch.no_grad():
            for current, synchronized in zip(self.weights, self.synchronized, strict=True):
                mixed = (
                    to_averaging_dtype(current) * local_fraction + synchronized * (1.0 - local_fraction)
                    if local_fraction
                    else synchronized
                )
                copy_into(current, mixed)

    def saved_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the state that is equal on all sites, as (kind, FQN, this rank's shard).

        The kinds are keys of checkpoints: "agreed" are the synchronised weights, "momentum" is the state of the outer
        optimizer, and "coming" is the pseudo-gradient that was sent and is not applied yet.
        """
        self.wait()
        pending_gradients = (
            [] if self._pending_gradient is None else _split_like(self._pending_gradient, self.synchronized)
        )
        for position, (member, parameter) in enumerate(zip(self.members, self.synchronized, strict=True)):
            yield "agreed", member.name, parameter.detach()
            momentum = None if self._optimizer is None else self._optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                yield "momentum", member.name, momentum
            if pending_gradients:
                yield "coming", member.name, pending_gradients[position]

    def restore(self, find: Callable[[str, str], Tensor | None], *, due_step: int | None) -> None:
        """Restore the saved state. `find(kind, name)` returns the saved tensor, or None if it was not saved."""
        self.reset()
        pending_gradients: list[Tensor] = []
        for member, parameter in zip(self.members, self.synchronized, strict=True):
            saved = {kind: find(kind, member.name) for kind in ("agreed", "momentum", "coming")}
            with torch.no_grad():
                parameter.copy_(parameter if saved["agreed"] is None else saved["agreed"])
            if saved["momentum"] is not None and self._optimizer is not None:
                self._optimizer.state[parameter]["momentum_buffer"] = saved["momentum"].to(parameter.device)
            pending = saved["coming"]
            pending_gradients.append(torch.zeros_like(parameter) if pending is None else pending.to(parameter.device))
        self.due_step = due_step
        if pending_gradients and due_step is not None:
            self._pending_gradient = _flatten(pending_gradients)


def to_averaging_dtype(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype in which means are computed: its own, but at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True)]
