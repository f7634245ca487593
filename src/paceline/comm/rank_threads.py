"""Where the replicas of one process meet: what ranks say to each other, said between threads.

Everybody posts a value in each round and takes all values when the last one has come. Sums are added in the order
of replicas by everybody, so that they are deterministic and the same for all.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import Op, PendingMessage, World
from paceline.errors import RunError


class PeerFailed(Exception):
    """Another replica failed; what this one would say is of no interest."""


@dataclass
class _Round:
    values: list[Any]
    present: int = 0


class ThreadRendezvous:
    """Numbered rounds; a replica may post the next one before it has read the last."""

    def __init__(self, *, replicas: int, timeout_seconds: float) -> None:
        self.replicas = replicas
        self._timeout = timeout_seconds
        self._changed = threading.Condition()
        self._rounds: dict[int, _Round] = {}
        self._next = [0] * replicas
        self._mail: dict[tuple[int, int, int], Any] = {}
        self._is_over = False

    def begin(self) -> None:
        """A new step; nobody is here."""
        self._rounds = {}
        self._mail = {}
        self._next = [0] * self.replicas
        self._is_over = False

    def leave(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def post(self, value: Any, *, replica: int) -> Callable[[], list[Any]]:
        """Say something; call what is returned to wait for everybody's."""
        with self._changed:
            number = self._next[replica]
            self._next[replica] += 1
            place = self._rounds.setdefault(number, _Round(values=[None] * self.replicas))
            place.values[replica] = value
            place.present += 1
            if place.present == self.replicas:
                del self._rounds[number]
                self._changed.notify_all()
        return lambda: self._collect(place)

    def send(self, value: Any, *, address: tuple[int, int, int]) -> None:
        """Leave something for one other: `address` is who sends it, who takes it, and its number between them."""
        with self._changed:
            self._mail[address] = value
            self._changed.notify_all()

    def receive(self, *, address: tuple[int, int, int]) -> Any:
        """Wait for what is sent to this address."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._is_over or address in self._mail, self._timeout)
            if address in self._mail:
                return self._mail.pop(address)
        raise PeerFailed if came else self._late(f"replica {address[0]} has sent nothing")

    def _collect(self, place: _Round) -> list[Any]:
        with self._changed:
            came = self._changed.wait_for(lambda: self._is_over or place.present == self.replicas, self._timeout)
            if place.present == self.replicas:
                return place.values
        raise PeerFailed if came else self._late(f"only {place.present} of {self.replicas} replicas came")

    def _late(self, what: str) -> RunError:
        return RunError(
            f"{what} within {self._timeout:g} s.",
            cause="a thread is stuck in the model, the loss or a lock that another thread holds",
            hint="--layout ddp, where each replica is a process of its own",
        )


@dataclass(frozen=True)
class _Delivery:
    """A message to a replica; waiting ends when it has arrived."""

    arrive: Callable[[], object] = lambda: None

    def is_completed(self) -> bool:
        """Nothing is under way by itself."""
        return False

    def wait(self) -> object:
        """Until it is here."""
        return self.arrive()


@dataclass(frozen=True, kw_only=True)
class ThreadWorld(World):
    """One replica's view: `rank` is the replica's number. Nothing leaves the process."""

    meeting: ThreadRendezvous = field(repr=False)

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of replicas."""
        return self.meeting.post(value, replica=self.rank)()

    def all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Tensor:
        """Reduce in place over all replicas and return it."""
        self.start_all_reduce(tensor, op=op)()
        return tensor

    def start_all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Callable[[], object]:
        """Give a copy of it now; call what is returned to have the result in it."""
        collect = self.meeting.post(tensor.detach().clone(), replica=self.rank)
        return lambda: tensor.detach().copy_(_reduced(collect(), op, tensor.device))

    def start_send(self, tensor: Tensor, *, to: int, tag: int) -> PendingMessage:
        """Leave a copy of it for one replica."""
        self.meeting.send(tensor.detach().clone(), address=(self.rank, to, tag))
        return _Delivery()

    def start_receive(self, tensor: Tensor, *, source: int, tag: int) -> PendingMessage:
        """Wait for what is returned, to have in the tensor what one replica has left."""
        address = (source, self.rank, tag)
        return _Delivery(lambda: tensor.detach().copy_(self.meeting.receive(address=address)))

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Copy `source`'s tensor over everybody's, in place."""
        values = self.exchange(tensor.detach().clone() if self.rank == source else None)
        tensor.detach().copy_(values[source])
        return tensor

    def gather_json(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of replicas; nobody gets another's objects."""
        return [json.loads(text) for text in self.exchange(json.dumps(value))]

    def close(self) -> None:
        """The process's own world is closed by its owner."""


def thread_worlds(*, replicas: int, world: World, timeout_seconds: float) -> list[World]:
    """One world for each replica; on GPUs replica k computes on the k-th. One replica keeps the world as it is."""
    if replicas == 1:
        return [world]
    meeting = ThreadRendezvous(replicas=replicas, timeout_seconds=timeout_seconds)
    return [
        ThreadWorld(rank=rank, world_size=replicas, local_rank=rank, device=_device(world, rank), meeting=meeting)
        for rank in range(replicas)
    ]


def _device(world: World, rank: int) -> torch.device:
    if world.device.type != "cuda":
        return world.device
    return torch.device("cuda", rank % torch.cuda.device_count())


def _reduced(values: list[Tensor], op: Op, device: torch.device) -> Tensor:
    combines: dict[str, Callable[[Tensor, Tensor], Tensor]]
    combines = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    combine = combines[op]
    total = values[0].to(device)
    for value in values[1:]:
        total = combine(total, value.to(device))
    return total
