"""Simulated ranks: one process simulates all of them, so that a step of thousands of ranks can be inspected.

Along every axis but the pipeline's, only the first rank runs, and collectives use its values for all ranks. Each stage
of a pipeline runs in a thread, and the threads exchange messages.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.process_group import Op, World
from paceline.comm.rank_threads import PeerFailed, ThreadRendezvous
from paceline.planner.layout.mesh import Mesh
from paceline.profiling.model_tracing.fake_execution import FakeStorages
from paceline.torch_internals.dispatch_modes import hide_from_modes

_COPIED_BYTES = 1 << 16  # of a message: enough for its header; the values of a fake tensor do not matter
_TIMEOUT_SECONDS = 3600.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class SimulatedRanks:
    """The shared state of the stages of one simulated run."""

    mesh: Mesh
    emptied: FakeStorages = field(default_factory=FakeStorages)
    meetings: dict[tuple[int, ...], ThreadRendezvous] = field(default_factory=dict)
    queues: "dict[tuple[Any, ...], SimpleQueue[_Message]]" = field(default_factory=lambda: defaultdict(SimpleQueue))
    groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    baton: threading.Lock = field(default_factory=threading.Lock)
    """The lock of the one stage that runs: much of a step's state is global to the process."""
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def in_stage(self) -> int:
        """The number of ranks in each stage."""
        return self.mesh.ranks // self.mesh.pp

    def world(self, stage: int, *, backend: str) -> "SimulatedWorld":
        """Return the world of all ranks, as the first rank of a stage sees it."""
        ranks = self.mesh.ranks
        return SimulatedWorld(
            rank=stage * self.in_stage,
            world_size=ranks,
            backend=backend if ranks > 1 else "none",
            group=self.group(ranks),
            is_imagined=True,
            scene=self,
            stages=tuple(range(self.mesh.pp)),
            stage=stage,
        )

    def group(self, size: int) -> dist.ProcessGroup | None:
        """Return a fake process group of this size; None for one rank."""
        if size == 1:
            return None
        with self.lock:
            if size not in self.groups:
                self.groups[size] = dist.new_group(list(range(size)))
            return self.groups[size]

    def meeting(self, stages: tuple[int, ...]) -> ThreadRendezvous:
        """Return the rendezvous of these stages."""
        with self.lock:
            if stages not in self.meetings:
                self.meetings[stages] = ThreadRendezvous(
                    replicas=len(stages), timeout_seconds=_TIMEOUT_SECONDS, pause=lambda _: self.others()
                )
            return self.meetings[stages]

    def next_of(self, queue: "SimpleQueue[_Message]") -> "_Message":
        """Return the next message of an edge.

        Raises:
            PeerFailed: another stage has failed.
        """
        with suppress(Empty):
            return queue.get_nowait()
        with self.others():
            while not self.is_over.is_set():
                with suppress(Empty):
                    return queue.get(timeout=_LOOK_SECONDS)
        raise PeerFailed

    @contextmanager
    def others(self) -> Iterator[None]:
        """Release the lock inside the block, so that other stages run."""
        self.baton.release()
        try:
            yield
        finally:
            self.baton.acquire()

    def leave(self) -> None:
        """Signal that one stage has failed, so that no other waits for it."""
        self.is_over.set()
        with self.lock:
            for meeting in self.meetings.values():
                meeting.leave()


@dataclass(frozen=True, kw_only=True)
class SimulatedWorld(World):
    """A world in which only this rank exists and, with `stages`, one rank of each stage."""

    scene: SimulatedRanks = field(repr=False)
    stages: tuple[int, ...] = (0,)
    stage: int = 0

    def part(self, groups: Sequence[Sequence[int]]) -> World:
        """Return this rank's group, as `World.part`; it must have the same number of ranks in each of its stages."""
        mine = next(list(ranks) for ranks in groups if self.rank in ranks)
        if len(mine) == self.world_size:
            return self
        stages = tuple(sorted({rank // self.scene.in_stage for rank in mine}))
        group = self.scene.group(len(mine))
        return replace(self, rank=mine.index(self.rank), world_size=len(mine), group=group, stages=stages, parts={})

    def all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Tensor:
        """Reduce with the other stages' values; other ranks of this stage have the same value."""
        if self.group is not None:
            super().all_reduce(tensor, op=op)
            self._reduced(tensor, op)
        return tensor

    def start_all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Callable[[], object]:
        """Run `all_reduce` at once, and return a function that does nothing."""
        if self.group is not None:
            super().start_all_reduce(tensor, op=op)()
            self._reduced(tensor, op)
        return _nothing

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Broadcast among stages; other ranks of this stage have the same value."""
        if self.group is not None and len(self.stages) > 1:
            values = self._exchange(tensor)
            tensor.copy_(values[self._place(source)])
        return super().broadcast(tensor, source=source)

    def start_send(self, tensor: Tensor, *, to: int, tag: int) -> "_Message":
        """Send a tensor to another stage."""
        self.sends("send", tensor)
        message = _Message(tensor=tensor, tells=self.backend != "gloo")
        self.scene.queues[self.stage, self.stages[to], tag].put(message)
        return message

    def start_receive(self, tensor: Tensor, *, source: int, tag: int) -> "_Arrival":
        """Receive a tensor from another stage."""
        queue = self.scene.queues[self.stages[source], self.stage, tag]

        def wait() -> None:
            message = self.scene.next_of(queue)
            sent = message.tensor
            with hide_from_modes(), torch.no_grad():
                tensor.view(-1)[:_COPIED_BYTES].copy_(sent.reshape(-1)[:_COPIED_BYTES])
            if self.scene.emptied.has(sent):
                self.scene.emptied.add(tensor)
            message.arrived.set()

        return _Arrival(wait)

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value: all ranks of a stage have the same."""
        if self.group is None:
            return [value]
        each = self._exchange(value) if len(self.stages) > 1 else [value]
        copies = self.world_size // len(each)
        return [told for one in each for told in [json.loads(json.dumps(one))] * copies]

    def share_json(self, value: Any, *, source: int = 0) -> Any:
        """Return the value of the source's stage."""
        each = self._exchange(value) if self.group is not None and len(self.stages) > 1 else [value]
        return each[self._place(source)] if len(each) > 1 else value

    def _place(self, rank: int) -> int:
        return rank // (self.world_size // len(self.stages))

    def _reduced(self, tensor: Tensor, op: Op) -> None:
        if len(self.stages) > 1:
            values = self._exchange(tensor.clone())
            tensor.copy_(values[0])
            for value in values[1:]:
                tensor.add_(value) if op == "sum" else tensor.copy_(getattr(torch, f"{op}imum")(tensor, value))
        if op == "sum":
            tensor.mul_(self.world_size // len(self.stages))

    def _exchange(self, value: Any) -> list[Any]:
        place = self.stages.index(self.stage)
        return self.scene.meeting(self.stages).post(value, replica=place)()


@dataclass(frozen=True, kw_only=True)
class _Message:
    """A message in flight until the other stage has received it; gloo does not report that before `wait`."""

    tensor: Tensor
    tells: bool
    arrived: threading.Event = field(default_factory=threading.Event)

    def is_completed(self) -> bool:
        return self.tells and self.arrived.is_set()

    def wait(self) -> None:
        """Do nothing: the message is in the queue already."""


@dataclass(frozen=True)
class _Arrival:
    wait: Callable[[], object]

    def is_completed(self) -> bool:
        return False


def _nothing() -> None:
    return None
