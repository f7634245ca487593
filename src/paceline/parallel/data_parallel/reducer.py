"""Bucketed gradient all-reduce for data parallelism, overlapped with backward.

The model is not wrapped, so parameter names stay unchanged. A hook on each parameter reports when its gradient is
ready; as soon as all gradients of a bucket are ready, its all-reduce starts (Li et al., "PyTorch Distributed", VLDB
2020). Gradients are *summed*, not averaged: `finish` divides by the global count of the loss.
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
    """A reducer sums the gradients of all ranks' microbatches to the gradient of the global batch."""

    @property
    def needs_equal_microbatches(self) -> bool:
        """Return whether all replicas must run equally many microbatches, because each backward communicates."""

    def begin(self) -> None:
        """Clear the gradients of the previous step."""

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Prepare for a microbatch's backward.

        `last`: this is the last microbatch of the step. With `has_samples=False` the microbatch contributes zeros.
        """

    def after_backward(self) -> None:
        """Collect gradients after a microbatch's backward."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Store the global gradient, divided by `divisor`, in each `.grad`; return False if the step must be rerun."""

    def close(self) -> None:
        """Remove the gradient hooks."""


class LocalReducer:
    """A reducer for one process, whose gradients are already global."""

    needs_equal_microbatches = False

    def __init__(self, *, named_parameters: Sequence[NamedParameter]) -> None:
        self._parameters = [member.parameter for member in named_parameters]

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        for parameter in self._parameters:
            parameter.grad = None

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Do nothing: there is nothing to prepare."""

    def after_backward(self) -> None:
        """Do nothing: autograd has already added to `.grad`."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Divide the gradients by `divisor`."""
        if divisor is not None:
            divide_all([p.grad for p in self._parameters if p.grad is not None], divisor)
        return True

    def close(self) -> None:
        """Do nothing: there are no hooks to remove."""


class Bucket(Protocol):
    """A bucket of gradients that are reduced together, in one or two messages.

    `flags` marks the parameters that got a gradient; it is empty or None, except in the model's last bucket.
    """

    members: list[NamedParameter]
    num_ready: int
    wait: Callable[[], object] | None
    flags: Tensor | None

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that one rank sends for this bucket."""

    def reset(self) -> None:
        """Reset the bucket for a new step, after waiting for messages still in flight from a dropped step."""

    def launch(self, world: World) -> None:
        """Copy the gradients to the buffer and start the first message."""

    def start_second_message(self) -> None:
        """Wait for the first message and start the second, if the bucket has a second one and has not started it."""

    def finish(self, divisor: float | Tensor | None) -> None:
        """Wait for the sums, divide them and store them in each `.grad`."""


class _AllReduceBucket:
    """A bucket of gradients that are reduced by one all-reduce.

    The gradients are copied into one tensor. A bucket with only one gradient is reduced in place, without a copy. The
    exception is the last bucket, which has `num_flags` extra elements, one for each parameter of the model: 1 if the
    parameter got a gradient, else 0.
    """

    def __init__(self, members: Sequence[NamedParameter], *, num_flags: int = 0) -> None:
        self.members = list(members)
        self.parameters = [member.parameter for member in members]
        self.num_ready = 0
        self.wait: Callable[[], object] | None = None
        self.is_finished = False
        self.flat: Tensor | None = None
        self.views: list[Tensor] = []
        self.flags: Tensor | None = None
        if len(members) > 1 or num_flags:
            first = self.parameters[0]
            sizes = [p.numel() for p in self.parameters]
            self.flat = torch.empty(sum(sizes) + num_flags, dtype=first.dtype, device=first.device)
            *flat_views, self.flags = self.flat.split([*sizes, num_flags])
            self.views = [view.view(p.shape) for view, p in zip(flat_views, self.parameters, strict=True)]

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that one rank sends in a ring all-reduce."""
        flags = 0 if self.flags is None else self.flags.nbytes
        return 2 * (ranks - 1) / ranks * (sum(p.nbytes for p in self.parameters) + flags)

    def launch(self, world: World) -> None:
        """Copy the gradients to the flat buffer and start its all-reduce."""
        self.wait = world.start_all_reduce(self._fill_payload())

    def start_second_message(self) -> None:
        """Do nothing: there is only one message."""

    def _fill_payload(self) -> Tensor:
        """Return the tensor to all-reduce: the filled flat buffer, or the gradient of a bucket's only parameter."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        if self.flat is None:
            self.parameters[0].grad = grads[0].contiguous()
            return self.parameters[0].grad
        copy_all(self.views, grads)
        for parameter in self.parameters:
            parameter.grad = None
        return self.flat

    def reset(self) -> None:
        """Reset the bucket for a new step, after waiting for messages still in flight from a dropped step."""
        if self.wait is not None and not self.is_finished:
            self.wait()
        self.num_ready, self.wait, self.is_finished = 0, None, False

    def finish(self, divisor: float | Tensor | None) -> None:
        """Wait for the all-reduce, divide the sums and set each `.grad` to its view of the flat buffer."""
        assert self.wait is not None
        self.wait()
        self.is_finished = True
        result = self.flat if self.flat is not None else self.parameters[0].grad
        assert result is not None
        if divisor is not None:
            result.div_(divisor)
        for parameter, view in zip(self.parameters, self.views, strict=False):
            parameter.grad = view


class BucketReducer:
    """A reducer that all-reduces gradients in buckets, overlapped with backward. `make_bucket` creates each bucket."""

    needs_equal_microbatches = False

    def __init__(
        self,
        *,
        named_parameters: Sequence[NamedParameter],
        world: World,
        make_bucket: Callable[..., Bucket] = _AllReduceBucket,
    ) -> None:
        self._world = world
        self._named_parameters = named_parameters = renumber_parameters(named_parameters)
        buckets = make_buckets(named_parameters)  # an empty list on a stage where all parameters are frozen
        self._buckets = [make_bucket(members) for members in buckets[:-1]]
        self._buckets += [make_bucket(last, num_flags=len(named_parameters)) for last in buckets[-1:]]
        self._has_grad = [False] * len(named_parameters)
        self._is_last_microbatch = False
        self._next_bucket = 0
        self._handles = [
            member.parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, member))
            for bucket in self._buckets
            for member in bucket.members
        ]

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that one rank sends in a step."""
        return sum(bucket.sent_bytes(ranks) for bucket in self._buckets)

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        for member in self._named_parameters:
            member.parameter.grad = None
        for bucket in self._buckets:
            bucket.reset()
        self._has_grad = [False] * len(self._named_parameters)
        self._is_last_microbatch = False
        self._next_bucket = 0

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Enable communication if this is the last microbatch; in earlier ones, gradients only accumulate locally."""
        self._is_last_microbatch = last

    def after_backward(self) -> None:
        """Do nothing: the hooks have already launched the full buckets."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Launch the remaining buckets, wait for all buckets and divide the sums."""
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.start_second_message()
        for bucket in self._buckets:
            bucket.finish(divisor)
        flags = self._buckets[-1].flags if self._buckets else None
        for member in self._named_parameters:
            assert flags is not None
            if not self._has_grad[member.index] and not flags[member.index]:
                member.parameter.grad = None
        return True

    def close(self) -> None:
        """Remove the gradient hooks."""
        for handle in self._handles:
            handle.remove()

    def _make_hook(self, bucket: Bucket, member: NamedParameter) -> Callable[[Tensor], None]:
        def on_grad_ready(_: Tensor) -> None:
            self._has_grad[member.index] = True
            if not self._is_last_microbatch:
                return
            if bucket.wait is not None:
                raise second_gradient_error(member.name)
            bucket.num_ready += 1
            while self._next_bucket < len(self._buckets) and self._is_full(self._buckets[self._next_bucket]):
                self._launch_next()

        return on_grad_ready

    @staticmethod
    def _is_full(bucket: Bucket) -> bool:
        return bucket.num_ready == len(bucket.members)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next_bucket]
        if bucket is self._buckets[-1] and bucket.flags is not None:
            bucket.flags.fill_(1.0)
            missing_indices = [member.index for member in self._named_parameters if not self._has_grad[member.index]]
            if missing_indices:
                bucket.flags[missing_indices] = 0.0
        if self._next_bucket > 1:  # two buckets later, since by then the first message has usually arrived
            self._buckets[self._next_bucket - 2].start_second_message()
        bucket.launch(self._world)
        self._next_bucket += 1


def second_gradient_error(name: str) -> RunError:
    """Return the error for a parameter that gets a gradient after its all-reduce has started."""
    return RunError(
        f"{name} received a second gradient after its all-reduce had started.",
        cause="backward ran twice through the same graph, or reentrant activation checkpointing did so",
        hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )


def unused_parameters_note(named_parameters: Sequence[NamedParameter]) -> str:
    """Return a note on parameters that got no gradient on any rank; empty if all got one."""
    names = [member.name for member in named_parameters if member.parameter.grad is None]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"no gradient reached {', '.join(names[:3])}{more} in the first step: not used by the loss, or behind a "
        f"detach(). They keep their initial values; requires_grad_(False) marks this as intended"
    )
