"""Ranks as threads of one process: replicas of the `threads` layout, and ranks that are simulated to check a layout.

In each round every replica posts a value, and reads all values once the last one has been posted. Every replica sums in
replica order, so sums are deterministic and the same on all replicas.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from paceline.comm.process_group import Op, PendingMessage, Shape, World
from paceline.errors import RunError
from paceline.torch_internals.rng import get_rng_states, preserve_rng, seed_all, set_rng_states

T = TypeVar("T")
_TIMEOUT_SECONDS = 600.0
_SIMULATION_SECONDS = 60.0  # a simulated rank waits only while other ranks compute the same step


class PeerFailed(Exception):
    """The error of a replica that waits for a failed replica, whose own error is reported instead."""


@dataclass
class _Round:
    """A round of the rendezvous: the value of each replica, and the number of values that were posted."""

    values: list[Any]
    num_posted: int = 0


class ThreadRendezvous:
    """A rendezvous in numbered rounds. A replica may post to the next round before it has read the previous one.

    `pause(replica)` returns a context in which that replica waits for the others. If `simulates` is True, error
    messages call the replicas simulated ranks.
    """

    def __init__(
        self,
        *,
        replicas: int,
        timeout_seconds: float,
        pause: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
        simulates: bool = False,
    ) -> None:
        self._simulates = simulates
        self.replicas = replicas
        self._pause = pause
        self._timeout = timeout_seconds
        self._condition = threading.Condition()
        self._rounds: dict[int, _Round] = {}
        self._next_round = [0] * replicas
        self._messages: dict[tuple[int, int, int], Any] = {}
        self._is_over = False

    def reset(self) -> None:
        """Reset all rounds and messages for a new step."""
        self._rounds = {}
        self._messages = {}
        self._next_round = [0] * self.replicas
        self._is_over = False

    def end(self) -> None:
        """Wake all waiting replicas and end the rendezvous."""
        with self._condition:
            self._is_over = True
            self._condition.notify_all()

    def post(self, value: Any, *, replica: int) -> Callable[[], list[Any]]:
        """Post a value to this replica's next round. The returned function waits for all replicas' values."""
        with self._condition:
            number = self._next_round[replica]
            self._next_round[replica] += 1
            round_ = self._rounds.setdefault(number, _Round(values=[None] * self.replicas))
            round_.values[replica] = value
            round_.num_posted += 1
            if round_.num_posted == self.replicas:
                del self._rounds[number]
                self._condition.notify_all()
        return lambda: self._collect(round_, replica)

    def send(self, value: Any, *, address: tuple[int, int, int]) -> None:
        """Store a message for one replica; `address` is (sender, receiver, tag)."""
        with self._condition:
            self._messages[address] = value
            self._condition.notify_all()

    def receive(self, *, address: tuple[int, int, int]) -> Any:
        """Wait for the message at this address, and return it."""
        with self._pause(address[1]), self._condition:
            is_in_time = self._condition.wait_for(lambda: self._is_over or address in self._messages, self._timeout)
            if address in self._messages:
                return self._messages.pop(address)
        raise PeerFailed if is_in_time else self._timeout_error(f"replica {address[0]} has sent nothing")

    def _collect(self, round_: _Round, replica: int) -> list[Any]:
        with self._pause(replica), self._condition:
            is_in_time = self._condition.wait_for(
                lambda: self._is_over or round_.num_posted == self.replicas, self._timeout
            )
            if round_.num_posted == self.replicas:
                return round_.values
        raise (
            PeerFailed
            if is_in_time
            else self._timeout_error(f"only {round_.num_posted} of {self.replicas} replicas reached a collective")
        )

    def _timeout_error(self, message: str) -> RunError:
        if self._simulates:
            return RunError(
                f"{message.replace('replica', 'simulated rank')} within {self._timeout:g} s.",
                cause="the ranks run different collectives: the forward depends on the rank or on random numbers",
                hint="a forward that runs the same operations on every rank, or a layout without tp, cp and ep",
            )
        return RunError(
            f"{message} within {self._timeout:g} s.",
            cause="a thread is stuck in the model, the loss or a lock that another thread holds",
            hint="--layout ddp, where each replica is a process of its own",
        )


@dataclass(frozen=True)
class _PendingMessage:
    """A message between replicas, sent or received; `wait` completes it."""

    complete: Callable[[], object] = lambda: None

    def is_completed(self) -> bool:
        """Return False: a message is only completed by `wait`."""
        return False

    def wait(self) -> object:
        """Wait until the message has arrived."""
        return self.complete()


@dataclass(frozen=True, kw_only=True)
class ThreadWorld(World):
    """A world of the replicas of one process: `rank` is the replica's number. No data leaves the process."""

    rendezvous: ThreadRendezvous = field(repr=False)

    def exchange(self, value: Any) -> list[Any]:
        """Return every replica's value, in replica order."""
        return self.rendezvous.post(value, replica=self.rank)()

    @override
    def all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Tensor:
        """Reduce the tensor in place over all replicas and return it."""
        self.start_all_reduce(tensor, op=op)()
        return tensor

    @override
    def start_all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Callable[[], object]:
        """Post a copy of the tensor; the returned function waits and writes the result into the tensor."""
        collect = self.rendezvous.post(tensor.detach().clone(), replica=self.rank)
        return lambda: tensor.detach().copy_(_reduce(collect(), op, tensor.device))

    @override
    def all_gather(self, tensor: Tensor, *, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return copies of every replica's tensor."""
        tensors = self.exchange(tensor.detach().clone())
        assert [tuple(part.shape) for part in tensors] == [tuple(shape) for shape in shapes]
        return [part.to(tensor.device, copy=True) for part in tensors]

    @override
    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Return this replica's rows of the sum."""
        return self.all_reduce(rows.clone()).chunk(self.world_size)[self.rank].contiguous()

    @override
    def all_to_all(self, rows: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows to every replica and return the received rows."""
        rows_by_rank = self.exchange(rows.detach().clone().split(list(send)))
        received = [parts[self.rank].to(rows.device) for parts in rows_by_rank]
        assert [len(part) for part in received] == list(receive), (
            "received a different number of rows than this rank's route expects"
        )
        return torch.cat(received)

    @override
    def start_ring_shift(self, tensors: Sequence[Tensor], *, shapes: Sequence[Shape]) -> Callable[[], list[Tensor]]:
        """Post copies of the tensors; the returned function waits for the previous replica's tensors."""
        collect = self.rendezvous.post([tensor.detach().clone() for tensor in tensors], replica=self.rank)

        def wait() -> list[Tensor]:
            sent = collect()[(self.rank - 1) % self.world_size]
            received = [part.to(tensor.device) for part, tensor in zip(sent, tensors, strict=True)]
            assert [tuple(tensor.shape) for tensor in received] == [tuple(shape) for shape in shapes]
            return received

        return wait

    @override
    def start_send(self, tensor: Tensor, *, to: int, tag: int) -> PendingMessage:
        """Send a copy of the tensor to one replica."""
        self.rendezvous.send(tensor.detach().clone(), address=(self.rank, to, tag))
        return _PendingMessage()

    @override
    def start_receive(self, tensor: Tensor, *, source: int, tag: int) -> PendingMessage:
        """Return a pending message; its `wait` copies the received tensor into `tensor`."""
        address = (source, self.rank, tag)
        return _PendingMessage(lambda: tensor.detach().copy_(self.rendezvous.receive(address=address)))

    @override
    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Copy `source`'s tensor to every replica, in place."""
        values = self.exchange(tensor.detach().clone() if self.rank == source else None)
        tensor.detach().copy_(values[source])
        return tensor

    @override
    def gather_json(self, value: Any) -> list[Any]:
        """Return every replica's value, in replica order, as copies."""
        return [json.loads(text) for text in self.exchange(json.dumps(value))]

    @override
    def close(self) -> None:
        """Do nothing: the caller closes the world of the process."""


def thread_worlds(
    *, replicas: int, world: World | None = None, timeout_seconds: float = _TIMEOUT_SECONDS
) -> list[World]:
    """Return one world per replica. With one replica, return `world` unchanged.

    On GPUs, replica k uses GPU k. If there are more replicas than GPUs, replicas share GPUs.
    """
    world = world or World.alone()
    if replicas == 1:
        return [world]
    return _worlds(world, ThreadRendezvous(replicas=replicas, timeout_seconds=timeout_seconds))


def _worlds(world: World, rendezvous: ThreadRendezvous) -> list[World]:
    replicas = rendezvous.replicas
    return [
        ThreadWorld(rank=rank, world_size=replicas, local_rank=rank, device=_device(world, rank), rendezvous=rendezvous)
        for rank in range(replicas)
    ]


def run_threads(work: Callable[[int], T], *, ranks: int, end_waiting: Callable[[], None]) -> list[T]:
    """Run `work(rank)` in one thread per rank and return the results.

    After an error in one thread, `end_waiting` is called, which ends the waiting of other threads.

    Raises:
        BaseException: the error of the lowest failed rank whose error is not `PeerFailed`.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # raised below, in the caller's thread
            errors[rank] = error
            end_waiting()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [errors[rank] for rank in sorted(errors)]
    for error in [*(error for error in failed if not isinstance(error, PeerFailed)), *failed]:
        raise error
    return [results[rank] for rank in range(ranks)]


def run_simulated_ranks(work: Callable[[World], T], *, ranks: int, seed: int | None = None) -> list[T]:
    """Run `work` in one thread and world per rank, and return the results.

    With a `seed`, each rank has its own random generators, all with this seed. Without it, all ranks share the
    generators of the process.

    Raises:
        BaseException: the error of the lowest failed rank whose error is not `PeerFailed`.
    """
    if seed is None:
        rendezvous = ThreadRendezvous(replicas=ranks, timeout_seconds=_SIMULATION_SECONDS, simulates=True)
        worlds = _worlds(World.alone(), rendezvous)
        return run_threads(lambda rank: work(worlds[rank]), ranks=ranks, end_waiting=rendezvous.end)
    with preserve_rng():
        rng_turns = _RankTurns(ranks=ranks, seed=seed)
        rendezvous = ThreadRendezvous(
            replicas=ranks, timeout_seconds=_SIMULATION_SECONDS, pause=rng_turns.pause, simulates=True
        )
        worlds = _worlds(World.alone(), rendezvous)

        def in_turn(rank: int) -> T:
            with rng_turns.run_as(rank):
                return work(worlds[rank])

        return run_threads(in_turn, ranks=ranks, end_waiting=rendezvous.end)


class _RankTurns:
    """A lock that lets one rank run at a time, with that rank's random generator states.

    All ranks start with the generators seeded by `seed`.
    """

    def __init__(self, *, ranks: int, seed: int) -> None:
        seed_all(seed)
        self._states = [get_rng_states()] * ranks
        self._turn = threading.Lock()

    @contextmanager
    def run_as(self, rank: int) -> Iterator[None]:
        """Return a context in which only this rank runs."""
        self._acquire(rank)
        try:
            yield
        finally:
            self._release(rank)

    @contextmanager
    def pause(self, rank: int) -> Iterator[None]:
        """Return a context in which other ranks may run."""
        self._release(rank)
        try:
            yield
        finally:
            self._acquire(rank)

    def _acquire(self, rank: int) -> None:
        self._turn.acquire()
        set_rng_states(self._states[rank])

    def _release(self, rank: int) -> None:
        self._states[rank] = get_rng_states()
        self._turn.release()


def _device(world: World, rank: int) -> torch.device:
    if world.device.type != "cuda":
        return world.device
    return torch.device("cuda", rank % torch.cuda.device_count())


def _reduce(values: list[Tensor], op: Op, device: torch.device) -> Tensor:
    combines: dict[str, Callable[[Tensor, Tensor], Tensor]]
    combines = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    combine = combines[op]
    total = values[0].to(device)
    for value in values[1:]:
        total = combine(total, value.to(device))
    return total
