"""Reduce gradients with error feedback: the unsent part (the residual) is added to the next step's gradient.

Gradients are divided by the sample count of their batch before compression. So the weight of a residual does not depend
on the sample count of the next batch (Stich et al., "Sparsified SGD with memory", 2018; Karimireddy et al., "Error
feedback fixes SignSGD", 2019). Since the sample count is known only after backward, nothing is sent before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.compression.residual_memory import DoubleBufferedTensors
from paceline.parallel.module_access.parameters import NamedParameter, make_buckets, renumber_parameters
from paceline.torch_internals.private_api import divide_all


class ErrorFeedbackBucket(Protocol):
    """A bucket of gradients that are sent together, in one or two messages.

    `residuals` are the parts of the gradients that are not sent.
    """

    residuals: DoubleBufferedTensors

    @property
    def persistent_buffers(self) -> tuple[DoubleBufferedTensors, ...]:
        """Return all buffers that persist from step to step."""

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank sends for this bucket."""

    def launch(self, world: World) -> None:
        """Compress the gradients, and start the first message."""

    def start_second_message(self) -> None:
        """Wait for the first message, and start the second if there is one."""

    def finish(self) -> Tensor:
        """Write the sums to each `.grad`, and return a float64 that is finite if all sums are finite.

        It is a float64 because a float32 total of finite sums may overflow.
        """


class ErrorFeedbackReducer:
    """A reducer that sums the compressed gradients of all ranks. Each rank stores its own residuals.

    `replica` is the index of this rank among the `num_replicas` ranks.
    """

    needs_equal_microbatches = False

    def __init__(
        self,
        *,
        named_parameters: Sequence[NamedParameter],
        world: World,
        make_bucket: Callable[[Sequence[NamedParameter]], ErrorFeedbackBucket],
        replica: int,
    ) -> None:
        self.replica = replica
        self.num_replicas = world.world_size
        self._world = world
        self._named_parameters = renumber_parameters(named_parameters)
        self._buckets = [make_bucket(members) for members in make_buckets(self._named_parameters)]

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank sends in a step."""
        flag_bytes = 2 * (ranks - 1) / ranks * len(self._named_parameters)
        return sum(bucket.sent_bytes(ranks) for bucket in self._buckets) + flag_bytes

    def begin(self) -> None:
        """Clear the last step's gradients."""
        for member in self._named_parameters:
            member.parameter.grad = None

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Do nothing; no preparation is needed."""

    def after_backward(self) -> None:
        """Do nothing, since autograd has already added to `.grad`."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Divide, send and sum the gradients; keep the old residuals if a gradient is not finite. Return True."""
        grads = [member.parameter.grad for member in self._named_parameters]
        flags = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8, device=self._world.device)
        wait_flags = self._world.start_all_reduce(flags, op="max")
        if divisor is not None:
            divide_all([grad for grad in grads if grad is not None], divisor)
        for bucket in self._buckets:
            bucket.launch(self._world)
        for bucket in self._buckets:
            bucket.start_second_message()
        is_finite = torch.isfinite(torch.stack([bucket.finish() for bucket in self._buckets]).sum())
        wait_flags()
        members_without_grad = [
            member for member, grad in zip(self._named_parameters, grads, strict=True) if grad is None
        ]
        unused_members = [member for member in members_without_grad if not flags[member.index]]
        for member in unused_members:
            member.parameter.grad = None
        for buffers in self._persistent_buffers():
            buffers.commit(is_finite=is_finite, unused_names=[member.name for member in unused_members])
        return True

    def undo(self) -> None:
        """Restore the residuals from before a step that was skipped."""
        for buffers in self._persistent_buffers():
            buffers.undo()

    def close(self) -> None:
        """Do nothing; there is nothing to remove."""

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """Return this replica's residuals, by FQN."""
        return {name: tensor for bucket in self._buckets for name, tensor in bucket.residuals.current.items()}

    @property
    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the other persistent buffers, which are equal on every replica."""
        return {
            name: tensor
            for bucket in self._buckets
            for buffers in bucket.persistent_buffers
            if buffers is not bucket.residuals
            for name, tensor in buffers.current.items()
        }

    def _persistent_buffers(self) -> Iterator[DoubleBufferedTensors]:
        for bucket in self._buckets:
            yield from bucket.persistent_buffers
