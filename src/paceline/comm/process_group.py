"""The world: this process's rank and the collectives over all ranks. It is passed as an argument, never global."""

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from paceline.bytes_sent import SENT_BYTES_PER_BYTE, Traffic
from paceline.console.formatting import plural
from paceline.console.output import capture_native_stderr
from paceline.errors import MachineError, UsageError
from paceline.launch.failures.oom_detection import explain_open_files
from paceline.launch.failures.peer_machines import peer_machines, this_machine
from paceline.launch.inherited_environment import LISTEN_FD, NODES, attempt_folder, own_environ
from paceline.nodes.rank_hints import join_hint

Op = Literal["sum", "max", "min"]
# torch 2.13 has new names for these two functions and warns about the old names, which are the only ones in 2.11.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Shape = tuple[int, ...]
_SHORT_BYTES, _LENGTH_BYTES = 1024, 8  # of the first message of `gather_json`, which begins with the length of the text
_CONNECT_TIMEOUT = timedelta(seconds=10)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """This process's rank and the rendezvous address, as a launcher sets them.

    `listen_fd` is the inherited socket on which rank 0 hosts the store, under Paceline's launcher.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    listen_fd: int | None = None

    @staticmethod
    def read(environ: Mapping[str, str]) -> "LaunchInfo":
        """Read the environment variables that torchrun and Paceline's launcher set."""
        environ = own_environ(environ)
        port, fd = environ.get("MASTER_PORT"), environ.get(LISTEN_FD)
        return LaunchInfo(
            rank=int(environ.get("RANK", 0)),
            world_size=int(environ.get("WORLD_SIZE", 1)),
            local_rank=int(environ.get("LOCAL_RANK", 0)),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", 1))),
            address=environ.get("MASTER_ADDR", "127.0.0.1"),
            port=int(port) if port else None,
            listen_fd=int(fd) if fd and int(environ.get("RANK", 0)) == 0 else None,
        )


@dataclass(frozen=True, kw_only=True)
class WorkerEndpoint:
    """The address at which workers outside the world connect. A new `session` ignores workers of earlier sessions."""

    launch_info: LaunchInfo
    session: str = "run"


class PendingMessage(Protocol):
    """A message in flight."""

    def is_completed(self) -> bool:
        """Return whether the message has been sent or received."""

    def wait(self) -> object:
        """Wait until the message has been sent or received."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that train together. With one process nothing is sent and no group is created.

    `store` is the rendezvous store. If the script has created the process group itself, `store` is None until
    `connect_store` connects to the rendezvous store. A world of parameter servers does not include the workers, because
    each worker may restart alone. The workers reach the servers through the rendezvous store, and `worker_endpoint` has
    the address of this store. `subgroups` caches the results of `subgroup`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    group: dist.ProcessGroup | None = None
    timeout_seconds: float = 600.0
    traffic: Traffic = field(default_factory=Traffic, repr=False, compare=False)
    worker_endpoint: WorkerEndpoint | None = None
    store: Store | None = field(default=None, repr=False, compare=False)
    subgroups: "dict[tuple[tuple[int, ...], ...], World]" = field(default_factory=dict, repr=False, compare=False)
    is_simulated: bool = False
    """True if other ranks and all tensor values are simulated; checks that need values are then skipped."""

    @staticmethod
    def alone(*, device: torch.device | None = None) -> "World":
        """Return a world of this process alone."""
        return World(device=device or torch.device("cpu"))

    @staticmethod
    def join(*, launch_info: LaunchInfo, device_type: str, backend: str, timeout_seconds: float) -> "World":
        """Join the other ranks, at the rendezvous address of `launch_info`. Every rank calls this once.

        Raises:
            MachineError: the ranks did not connect in time, or the device is missing.
            UsageError: the script has already created a process group.
        """
        device = _device(device_type, launch_info.local_rank)
        if launch_info.world_size == 1:
            return World.alone(device=device)
        _destroy_failed_group()
        timeout = timedelta(seconds=timeout_seconds)
        with capture_native_stderr() as captured:
            try:
                store = _next_store(launch_info, timeout)
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=launch_info.rank,
                    world_size=launch_info.world_size,
                    timeout=timeout,
                )
            except (dist.DistError, RuntimeError, ValueError) as error:
                text_path = captured and captured.save_to_temporary_file(f"paceline-rank-{launch_info.rank}-")
                cause, hint = explain_open_files(str(error)) or ("", _hint_for_join(launch_info))
                raise MachineError(
                    f"rank {launch_info.rank} of {launch_info.world_size} could not join the other ranks: {error}",
                    where=f"{launch_info.address}:{launch_info.port}, backend {backend}"
                    + (f"; full text: {text_path}" if text_path else ""),
                    cause=cause,
                    hint=hint,
                ) from error
        _created_groups.append(dist.group.WORLD)
        world = World(
            rank=launch_info.rank,
            world_size=launch_info.world_size,
            local_rank=launch_info.local_rank,
            device=device,
            backend=backend,
            group=dist.group.WORLD,
            timeout_seconds=timeout_seconds,
            store=store,
        )
        has_other_nodes = launch_info.local_world_size < launch_info.world_size
        if has_other_nodes or attempt_folder(os.environ) is None:  # another launcher may not give the local numbers
            peer_machines.record(world.gather_json(this_machine()))
        return world

    def connect_store(self) -> Store:
        """Return the rendezvous store. If `store` is None, connect to the rendezvous address of the environment first.

        Raises:
            dist.DistError, RuntimeError: the process that hosts the store has exited.
        """
        if self.store is None:
            launch_info = LaunchInfo.read(os.environ)
            store = TCPStore(launch_info.address, launch_info.port or 0, is_master=False, timeout=_CONNECT_TIMEOUT)
            object.__setattr__(self, "store", store)
        assert self.store is not None
        return self.store

    def subgroup(self, groups: Sequence[Sequence[int]]) -> "World":
        """Return the world of the ranks that share one of `groups` with this rank; every rank calls this.

        A group of one sends nothing, and a group of all ranks is this world itself.
        """
        local_group = next(list(ranks) for ranks in groups if self.rank in ranks)
        if len(local_group) == self.world_size:
            return self
        key = tuple(map(tuple, groups))
        if key not in self.subgroups:
            self.subgroups[key] = self._new_subgroup(groups, local_group)
        return self.subgroups[key]

    def _new_subgroup(self, groups: Sequence[Sequence[int]], local_group: list[int]) -> "World":
        timeout = timedelta(seconds=self.timeout_seconds)
        new_groups = [dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None for ranks in groups]
        group = next(new_group for new_group, ranks in zip(new_groups, groups, strict=True) if self.rank in ranks)
        return replace(self, rank=local_group.index(self.rank), world_size=len(local_group), group=group, subgroups={})

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes the run's output."""
        return self.rank == 0

    def record_operation(self, kind: str, tensor: torch.Tensor) -> None:
        """Count a collective that this rank is about to start, and the bytes that it sends in it.

        `kind` is the kind of the collective, a key of `SENT_BYTES_PER_BYTE`.
        """
        traffic = self.traffic
        traffic.sent_bytes += self._sent_shares[kind] * tensor.nbytes
        traffic.num_operations += 1
        traffic.last_operation = kind

    @cached_property
    def _sent_shares(self) -> dict[str, float]:
        return {kind: share(self.world_size) for kind, share in SENT_BYTES_PER_BYTE.items()}

    def all_reduce(self, tensor: torch.Tensor, *, op: Op = "sum") -> torch.Tensor:
        """Reduce the tensor in place over all ranks and return it."""
        if self.group is not None:
            self.record_operation("all_reduce", tensor)
            dist.all_reduce(tensor, op=_OPS[op], group=self.group)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, *, op: Op = "sum") -> Callable[[], object]:
        """Start an in-place all-reduce; the returned function waits for it."""
        if self.group is None:
            return _no_wait
        self.record_operation("all_reduce", tensor)
        return _wait_function(dist.all_reduce(tensor, op=_OPS[op], group=self.group, async_op=True))

    def start_all_to_all(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        """Start an all-to-all: row r of `source` is sent to rank r, and row r of `target` receives rank r's row."""
        self.record_operation("all_to_all", source)
        return _wait_function(dist.all_to_all_single(target, source, group=self.group, async_op=True))

    def all_gather(self, tensor: torch.Tensor, *, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """Return every rank's tensor; that of rank r has shape `shapes[r]`. Smaller tensors are padded while sent."""
        if self.group is None:
            return [tensor]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = tensor.new_zeros(max(sizes))
        flat[: tensor.numel()] = tensor.reshape(-1)
        parts = [torch.empty_like(flat) for _ in sizes]
        self.record_operation("all_gather", flat)
        dist.all_gather(parts, flat, group=self.group)
        return [part[:size].view(shape) for part, size, shape in zip(parts, sizes, shapes, strict=True)]

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the sum over all ranks; every rank has the same number of rows."""
        if self.group is None:
            return rows
        local_rows = rows.new_empty((len(rows) // self.world_size, *rows.shape[1:]))
        self.record_operation("reduce_scatter", rows)
        REDUCE_SCATTER(local_rows, rows, group=self.group)
        return local_rows

    def all_to_all(self, rows: torch.Tensor, *, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send `send[r]` consecutive rows to rank r; return `receive[r]` rows from each rank r, in rank order."""
        if self.group is None:
            return rows.clone()
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        self.record_operation("all_to_all", rows)
        dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=self.group)
        return received

    def start_ring_shift(
        self, tensors: Sequence[torch.Tensor], *, shapes: Sequence[Shape]
    ) -> Callable[[], list[torch.Tensor]]:
        """Start to send tensors to the next rank. The returned function waits for the previous rank's tensors."""
        if self.group is None:
            return lambda: list(tensors)
        sent = [tensor.contiguous() for tensor in tensors]
        received = [tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        following, previous = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        send_ops = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=following) for tensor in sent]
        receive_ops = [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=previous) for tensor in received]
        for tensor in sent:
            self.record_operation("send", tensor)
        works = dist.batch_isend_irecv([*send_ops, *receive_ops])

        def wait() -> list[torch.Tensor]:
            for work in works:
                work.wait()
            sent.clear()
            return received

        return wait

    def start_send(self, tensor: torch.Tensor, *, to: int, tag: int) -> "PendingMessage":
        """Start to send a tensor to one rank. The tensor must not change before the send has completed."""
        self.record_operation("send", tensor)
        return _require_work(dist.isend(tensor, group=self.group, group_dst=to, tag=tag))

    def start_receive(self, tensor: torch.Tensor, *, source: int, tag: int) -> "PendingMessage":
        """Start to receive a tensor that one rank sends with this tag."""
        return _require_work(dist.irecv(tensor, group=self.group, group_src=source, tag=tag))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        """Copy `source`'s tensor to all ranks, in place."""
        if self.group is not None:
            self.record_operation("broadcast", tensor)
            dist.broadcast(tensor, group_src=source, group=self.group)
        return tensor

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank. Values are sent as JSON: nothing is pickled."""
        if self.group is None:
            return [value]
        text = json.dumps(value).encode()
        parts = self._gather_bytes(len(text).to_bytes(_LENGTH_BYTES, "little") + text, length=_SHORT_BYTES)
        lengths = [int.from_bytes(part[:_LENGTH_BYTES], "little") for part in parts]
        texts = [part[_LENGTH_BYTES:][:length] for part, length in zip(parts, lengths, strict=True)]
        num_first = _SHORT_BYTES - _LENGTH_BYTES
        if max(lengths) > num_first:
            rests = self._gather_bytes(text[num_first:], length=max(lengths) - num_first)
            texts = [(first + rest)[:length] for first, rest, length in zip(texts, rests, lengths, strict=True)]
        return [json.loads(text) for text in texts]

    def _gather_bytes(self, data: bytes, *, length: int) -> list[bytes]:
        """Return the first `length` bytes of every rank's data; shorter data is padded."""
        padded = torch.frombuffer(bytearray(data[:length].ljust(length, b"\0")), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        self.record_operation("all_gather", padded)
        dist.all_gather(parts, padded, group=self.group)
        return [bytes(part.cpu().numpy()) for part in parts]

    def share_json(self, value: Any, *, source: int = 0) -> Any:
        """Return `source`'s value, on every rank."""
        return self.gather_json(value if self.rank == source else None)[source]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Destroy the process group; every rank calls this once, at the end."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()
        _created_groups.clear()
        self.release_group()

    def release_group(self) -> None:
        """Release the group and the store, so that the group's threads end before the interpreter exits."""
        if self.group is not None:
            for world in (self, *self.subgroups.values()):
                object.__setattr__(world, "group", None)
            object.__setattr__(self, "store", None)
            gc.collect()


def _hint_for_join(launch_info: LaunchInfo) -> str:
    """Return what to type after the ranks could not join each other."""
    environ = own_environ(os.environ)
    if environ.get(NODES):
        return join_hint(environ[NODES])
    if launch_info.local_world_size >= launch_info.world_size:
        return "paceline train JOB --ranks 1 to see whether one process works"
    if "SLURM_STEP_ID" in environ:
        return "srun --ntasks-per-node=1 paceline doctor, which names what is wrong"
    num_nodes = environ.get("GROUP_WORLD_SIZE", "N")
    return f"on every node: paceline doctor --nodes {num_nodes}:{launch_info.address}, which names what is wrong"


_created_groups: list[dist.ProcessGroup | None] = []
"""The process group that Paceline has created in this process; it may belong to a failed run."""


def _destroy_failed_group() -> None:
    """Destroy the group of a failed run, so that a script that catches the error can start another run.

    Raises:
        UsageError: the script itself created the group.
    """
    if not dist.is_initialized():
        return
    if dist.group.WORLD not in _created_groups:
        raise UsageError(
            f"this process is already in a process group of {dist.get_world_size()} ranks, which the script created.",
            cause="the script calls torch.distributed.init_process_group(), and this run joins the ranks by itself",
            hint="remove init_process_group(), or keep your own loop and its group with pl.place (docs/place.md)",
        )
    _created_groups.clear()
    dist.destroy_process_group()


_store_by_address: dict[tuple[str, int | None], tuple[Store, Iterator[int]]] = {}
"""The store at each rendezvous address, and a counter of the worlds that were created with it."""


def _next_store(launch_info: LaunchInfo, timeout: timedelta) -> Store:
    """Return a store for one world, whose prefix separates its keys from those of earlier worlds.

    After a restart, torchrun offers the same store again. It still has the keys of the failed attempt, such as the
    addresses of dead processes, so the prefix also has the number of the restart. On several nodes, the agents may
    count restarts differently, and the prefix does not have the number.
    """
    address = launch_info.address, launch_info.port
    if address not in _store_by_address:
        _store_by_address[address] = _store(launch_info, timeout), count()
    store, numbers = _store_by_address[address]
    environ = own_environ(os.environ)
    is_one_node = environ.get("GROUP_WORLD_SIZE", "1") == "1"
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node else "0"
    return PrefixStore(f"attempt-{restarts}-world-{next(numbers)}", store)


def _store(launch_info: LaunchInfo, timeout: timedelta) -> Store:
    """Return the store of the launcher. Under Paceline's launcher, rank 0 hosts it on an inherited listening socket."""
    if own_environ(os.environ).get(LISTEN_FD) is None:
        store: Store = next(rendezvous("env://", launch_info.rank, launch_info.world_size, timeout=timeout))[0]
        return store
    return TCPStore(
        launch_info.address,
        launch_info.port or 0,
        world_size=launch_info.world_size,
        is_master=launch_info.listen_fd is not None,
        timeout=timeout,
        master_listen_fd=launch_info.listen_fd,
    )


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    if local_rank >= torch.cuda.device_count():
        raise MachineError(
            f"this rank needs GPU {local_rank}, but this machine has {plural(torch.cuda.device_count(), 'GPU')}.",
            hint="--device cpu, or fewer ranks",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _require_work(work: dist.Work | None) -> PendingMessage:
    assert work is not None
    return work


def _wait_function(work: dist.Work | None) -> Callable[[], object]:
    return _require_work(work).wait


def _no_wait() -> None:
    return None
