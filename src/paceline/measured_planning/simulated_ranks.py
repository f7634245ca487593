"""Simulated ranks: one process simulates all ranks of a run, so that a step of thousands of ranks can be inspected.

In this module, a stage is a position in the pipeline. Its ranks may have several pipeline stages. Only the first rank
of each stage runs, in a thread of its own. The threads exchange messages. Collectives act as if all ranks of a stage
had the values of its first rank.
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
from typing_extensions import override

from paceline.comm.process_group import Op, World
from paceline.comm.rank_threads import PeerFailed, ThreadRendezvous
from paceline.planner.layout.mesh import Mesh
from paceline.profiling.model_tracing.fake_execution import FakeStorages
from paceline.torch_internals.dispatch_modes import hide_from_modes

_COPIED_ELEMENTS = 1 << 16  # of a message: enough for the header; the values of a fake tensor are not needed
_TIMEOUT_SECONDS = 3600.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class SimulatedRanks:
    """The state that the stages of one simulated run share."""

    mesh: Mesh
    fake_storages: FakeStorages = field(default_factory=FakeStorages)
    rendezvous_by_stages: dict[tuple[int, ...], ThreadRendezvous] = field(default_factory=dict)
    queues: "dict[tuple[Any, ...], SimpleQueue[_Message]]" = field(default_factory=lambda: defaultdict(SimpleQueue))
    """Messages in flight, by sending stage, receiving stage and tag."""
    groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    """Fake process groups, by size."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    run_lock: threading.Lock = field(default_factory=threading.Lock)
    """The lock that the running stage has. Only one stage runs at a time, because a step uses global state."""
    has_failed: threading.Event = field(default_factory=threading.Event)

    @property
    def ranks_per_stage(self) -> int:
        """The number of ranks in each stage."""
        return self.mesh.ranks // self.mesh.pp

    def world(self, stage: int, *, backend: str) -> "SimulatedWorld":
        """Return the world of all ranks, as the first rank of a stage sees it."""
        ranks = self.mesh.ranks
        return SimulatedWorld(
            rank=stage * self.ranks_per_stage,
            world_size=ranks,
            backend=backend if ranks > 1 else "none",
            group=self.fake_group(ranks),
            is_simulated=True,
            simulated_ranks=self,
            stages=tuple(range(self.mesh.pp)),
            stage=stage,
        )

    def fake_group(self, size: int) -> dist.ProcessGroup | None:
        """Return a fake process group of this size; None for one rank."""
        if size == 1:
            return None
        with self.lock:
            if size not in self.groups:
                self.groups[size] = dist.new_group(list(range(size)))
            return self.groups[size]

    def rendezvous(self, stages: tuple[int, ...]) -> ThreadRendezvous:
        """Return the rendezvous at which these stages exchange values."""
        with self.lock:
            if stages not in self.rendezvous_by_stages:
                self.rendezvous_by_stages[stages] = ThreadRendezvous(
                    replicas=len(stages), timeout_seconds=_TIMEOUT_SECONDS, pause=lambda _: self.let_other_stages_run()
                )
            return self.rendezvous_by_stages[stages]

    def receive_message(self, queue: "SimpleQueue[_Message]") -> "_Message":
        """Return the next message of the queue.

        Raises:
            PeerFailed: another stage has failed.
        """
        with suppress(Empty):
            return queue.get_nowait()
        with self.let_other_stages_run():
            while not self.has_failed.is_set():
                with suppress(Empty):
                    return queue.get(timeout=_POLL_SECONDS)
        raise PeerFailed

    @contextmanager
    def let_other_stages_run(self) -> Iterator[None]:
        """Release the run lock inside the `with` block, so that other stages can run."""
        self.run_lock.release()
        try:
            yield
        finally:
            self.run_lock.acquire()

    def abort(self) -> None:
        """Signal that one stage has failed, so that the other stages stop waiting for it."""
        self.has_failed.set()
        with self.lock:
            for rendezvous in self.rendezvous_by_stages.values():
                rendezvous.end()


@dataclass(frozen=True, kw_only=True)
class SimulatedWorld(World):
    """A world in which only one rank of each stage runs.

    `stages` are the stages that have ranks in this world, and `stage` is that of this rank.
    """

    simulated_ranks: SimulatedRanks = field(repr=False)
    stages: tuple[int, ...] = (0,)
    stage: int = 0

    @override
    def subgroup(self, groups: Sequence[Sequence[int]]) -> World:
        """Return this rank's group, like `World.subgroup`. A group must have equally many ranks in each stage."""
        group_ranks = next(list(ranks) for ranks in groups if self.rank in ranks)
        if len(group_ranks) == self.world_size:
            return self
        stages = tuple(sorted({rank // self.simulated_ranks.ranks_per_stage for rank in group_ranks}))
        group = self.simulated_ranks.fake_group(len(group_ranks))
        return replace(
            self,
            rank=group_ranks.index(self.rank),
            world_size=len(group_ranks),
            group=group,
            stages=stages,
            subgroups={},
        )

    @override
    def all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Tensor:
        """Reduce the tensor as if all ranks of a stage had the value of the stage's first rank."""
        if self.group is not None:
            super().all_reduce(tensor, op=op)
            self._reduce_over_stages(tensor, op)
        return tensor

    @override
    def start_all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Callable[[], object]:
        """Run `all_reduce` at once, and return a function that does nothing."""
        if self.group is not None:
            super().start_all_reduce(tensor, op=op)()
            self._reduce_over_stages(tensor, op)
        return _do_nothing

    @override
    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Broadcast the value of the stage that the source rank is in."""
        if self.group is not None and len(self.stages) > 1:
            values = self._exchange(tensor)
            tensor.copy_(values[self._stage_index(source)])
        return super().broadcast(tensor, source=source)

    @override
    def start_send(self, tensor: Tensor, *, to: int, tag: int) -> "_Message":
        """Send a tensor to the stage of rank `to`. The message arrives at once."""
        self.record_operation("send", tensor)
        message = _Message(tensor=tensor, reports_completion=self.backend != "gloo")
        self.simulated_ranks.queues[self.stage, self.stages[to], tag].put(message)
        return message

    @override
    def start_receive(self, tensor: Tensor, *, source: int, tag: int) -> "_PendingReceive":
        """Return a pending receive from the stage of rank `source`. `wait` copies the start of the message."""
        queue = self.simulated_ranks.queues[self.stages[source], self.stage, tag]

        def wait() -> None:
            message = self.simulated_ranks.receive_message(queue)
            sent = message.tensor
            with hide_from_modes(), torch.no_grad():
                tensor.view(-1)[:_COPIED_ELEMENTS].copy_(sent.reshape(-1)[:_COPIED_ELEMENTS])
            if self.simulated_ranks.fake_storages.has(sent):
                self.simulated_ranks.fake_storages.add(tensor)
            message.is_received.set()

        return _PendingReceive(wait)

    @override
    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, as if all ranks of a stage had the value of its first rank."""
        if self.group is None:
            return [value]
        stage_values = self._exchange(value) if len(self.stages) > 1 else [value]
        ranks_per_stage = self.world_size // len(stage_values)
        return [copy for value in stage_values for copy in [json.loads(json.dumps(value))] * ranks_per_stage]

    @override
    def share_json(self, value: Any, *, source: int = 0) -> Any:
        """Return the value of the stage that the source rank is in."""
        stage_values = self._exchange(value) if self.group is not None and len(self.stages) > 1 else [value]
        return stage_values[self._stage_index(source)] if len(stage_values) > 1 else value

    def _stage_index(self, rank: int) -> int:
        """Return the index in `stages` of the stage that a rank is in."""
        return rank // (self.world_size // len(self.stages))

    def _reduce_over_stages(self, tensor: Tensor, op: Op) -> None:
        if len(self.stages) > 1:
            values = self._exchange(tensor.clone())
            tensor.copy_(values[0])
            for value in values[1:]:
                tensor.add_(value) if op == "sum" else tensor.copy_(getattr(torch, f"{op}imum")(tensor, value))
        if op == "sum":
            tensor.mul_(self.world_size // len(self.stages))

    def _exchange(self, value: Any) -> list[Any]:
        """Return the values that all stages of this world pass, in their order. Each stage calls this."""
        replica = self.stages.index(self.stage)
        return self.simulated_ranks.rendezvous(self.stages).post(value, replica=replica)()


@dataclass(frozen=True, kw_only=True)
class _Message:
    """A message that is in flight until the other stage has received it.

    With gloo, `is_completed` is always False, because gloo references a sent tensor until the end of the step.
    """

    tensor: Tensor
    reports_completion: bool
    is_received: threading.Event = field(default_factory=threading.Event)

    def is_completed(self) -> bool:
        return self.reports_completion and self.is_received.is_set()

    def wait(self) -> None:
        """Do nothing: the message is in the queue already."""


@dataclass(frozen=True)
class _PendingReceive:
    """A receive that happens in `wait`. `is_completed` is always False; callers use it only for sends."""

    wait: Callable[[], object]

    def is_completed(self) -> bool:
        return False


def _do_nothing() -> None:
    return None
