"""Small vectors of several steps travel in one message."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.step.local_sgd.message_batching import MessageBatcher


class Peers:
    """Two ranks that have the same: a sum is twice a vector, once it is waited for."""

    def __init__(self) -> None:
        self.messages: list[list[float]] = []

    def start_all_reduce(self, vector: Tensor) -> Callable[[], object]:
        self.messages.append(vector.tolist())
        return lambda: vector.mul_(2)


def bundle_of(peers: Any, *, most: int) -> MessageBatcher:
    return MessageBatcher(peers, max_vectors=most)


def test_full_messages_leave_at_once_and_sums_are_there_when_waited_for() -> None:
    peers, vectors = Peers(), [torch.arange(length, dtype=torch.float64) + length for length in (1, 3, 2, 1)]
    bundle, before = bundle_of(peers, most=2), [vector.clone() for vector in vectors]
    waits = [bundle.add(vector) for vector in vectors]
    assert peers.messages == [[1, 3, 4, 5], [2, 3, 1]]
    for place, wait in enumerate(waits):
        wait()
        assert torch.equal(vectors[place], before[place] * 2)
    assert len(peers.messages) == 2


def test_who_waits_early_sends_what_is_there() -> None:
    peers, vectors = Peers(), [torch.full((2,), float(number)) for number in range(5)]
    bundle = bundle_of(peers, most=3)
    first, second = bundle.add(vectors[0]), bundle.add(vectors[1])
    assert not peers.messages
    second()
    assert peers.messages == [[0, 0, 1, 1]] and vectors[1].tolist() == [2, 2]
    rest = [bundle.add(vector) for vector in vectors[2:]]  # a message of their own, full again
    assert peers.messages[1:] == [[2, 2, 3, 3, 4, 4]]
    for wait in (first, *rest):
        wait()
    assert [vector[0].item() for vector in vectors] == [0, 2, 4, 6, 8] and len(peers.messages) == 2
