"""Batching of small vectors of several steps into one message, since each message has a fixed cost on a slow link."""

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm.process_group import World


class MessageBatcher:
    """A batcher that sends up to `max_vectors` vectors in one all-reduce over `peers`.

    All peers add their vectors in the same order.
    """

    def __init__(self, peers: World, *, max_vectors: int) -> None:
        self.peers = peers
        self._max_vectors = max_vectors
        self._current = _Message()

    def add(self, vector: Tensor) -> Callable[[], None]:
        """Add a vector to the current message. Return a function that waits for the sum and copies it into `vector`.

        If the function is called before the message is full, it first sends the message as it is.
        """
        if self._current.is_sent:
            self._current = _Message()
        message = self._current
        message.vectors.append(vector)
        if len(message.vectors) == self._max_vectors:
            self.send()
        return lambda: message.complete(self.peers)

    def send(self) -> None:
        """Send the current message if it has vectors and was not sent yet."""
        if self._current.vectors and not self._current.is_sent:
            self._current.send(self.peers)


class _Message:
    """A set of vectors that are summed in one all-reduce."""

    def __init__(self) -> None:
        self.vectors: list[Tensor] = []
        self.is_sent = False
        self._flat: Tensor | None = None
        self._wait: Callable[[], object] | None = None

    def send(self, peers: World) -> None:
        """Start the all-reduce."""
        self.is_sent = True
        self._flat = torch.cat(self.vectors)
        self._wait = peers.start_all_reduce(self._flat)

    def complete(self, peers: World) -> None:
        """Wait for the all-reduce and copy the sums into the vectors; send first if necessary."""
        if not self.is_sent:
            self.send(peers)
        if self._wait is not None and self._flat is not None:
            self._wait()
            self._wait = None
            for vector, part in zip(self.vectors, self._flat.split([v.numel() for v in self.vectors]), strict=True):
                vector.copy_(part)
