"""Small vectors of several steps that travel in one message: on a slow line each message costs more than it holds."""

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm.process_group import World


class MessageBatcher:
    """Sums over `peers`, of up to `most` vectors at once. All of them add, and wait, in the same order."""

    def __init__(self, peers: World, *, most: int) -> None:
        self.peers = peers
        self._most = most
        self._filling = _Message()

    def add(self, vector: Tensor) -> Callable[[], None]:
        """To the message that is being filled. What this gives waits, and leaves the sum in `vector`; a message that is
        waited for before it is full goes as it is."""
        if self._filling.is_sent:
            self._filling = _Message()
        message = self._filling
        message.vectors.append(vector)
        if len(message.vectors) == self._most:
            self.send()
        return lambda: message.arrive(self.peers)

    def send(self) -> None:
        """What there is, as one message."""
        if self._filling.vectors and not self._filling.is_sent:
            self._filling.send(self.peers)


class _Message:
    """Vectors that are summed up together."""

    def __init__(self) -> None:
        self.vectors: list[Tensor] = []
        self.is_sent = False
        self._flat: Tensor | None = None
        self._wait: Callable[[], object] | None = None

    def send(self, peers: World) -> None:
        """On its way."""
        self.is_sent = True
        self._flat = torch.cat(self.vectors)
        self._wait = peers.start_all_reduce(self._flat)

    def arrive(self, peers: World) -> None:
        """The sums are in their vectors."""
        if not self.is_sent:
            self.send(peers)
        if self._wait is not None and self._flat is not None:
            self._wait()
            self._wait = None
            for vector, part in zip(self.vectors, self._flat.split([v.numel() for v in self.vectors]), strict=True):
                vector.copy_(part)
