"""The world: this process's rank among all, and what ranks say to each other. Passed around, never global."""

import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.bytes_sent import Traffic
from paceline.console.output import capture_native_stderr
from paceline.errors import MachineError
from paceline.launch.environment_owner import LISTEN_FD, own_environ

Op = Literal["sum", "max", "min"]
# torch 2.13 has new names for both and warns at the old ones, which are all that 2.11 has.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_ASKED = timedelta(seconds=10)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """Where this process stands: what a launcher tells it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    listen_fd: int | None = None

    @staticmethod
    def read(environ: Mapping[str, str]) -> "LaunchInfo":
        """From the variables that torchrun and our own launcher set."""
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
class WorkerEntrance:
    """Where processes that are none of a world's ranks come in; `session` tells one opening from the next."""

    place: LaunchInfo
    session: str = "run"


class PendingMessage(Protocol):
    """A message under way."""

    def is_completed(self) -> bool:
        """Whether it has left, or arrived."""

    def wait(self) -> object:
        """Until then."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that train together. With one process nothing is sent and no group is made.

    `store` is where they met, None where another launcher keeps it, until `words` asks there. Where others that are
    none of them come and go, `entrance` is where they ask, and `store` who answers.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    group: dist.ProcessGroup | None = None
    timeout_seconds: float = 600.0
    traffic: Traffic = field(default_factory=Traffic, repr=False, compare=False)
    entrance: WorkerEntrance | None = None
    store: TCPStore | None = field(default=None, repr=False, compare=False)
    parts: "dict[tuple[tuple[int, ...], ...], World]" = field(default_factory=dict, repr=False, compare=False)
    is_imagined: bool = False
    """Whether the other ranks are not there, and no number is: what is tried on values is not tried."""

    @staticmethod
    def alone(*, device: torch.device | None = None) -> "World":
        """A world of this one process."""
        return World(device=device or torch.device("cpu"))

    @staticmethod
    def join(*, place: LaunchInfo, device_type: str, backend: str, timeout_seconds: float) -> "World":
        """Meet the other ranks; every rank calls this once.

        Raises:
            MachineError: the ranks did not meet in time, or the device is missing.
        """
        device = _device(device_type, place.local_rank)
        if place.world_size == 1:
            return World.alone(device=device)
        timeout = timedelta(seconds=timeout_seconds)
        with capture_native_stderr() as said:
            try:
                store, init = _store(place, timeout)
                dist.init_process_group(
                    backend,
                    init_method=init,
                    store=store,
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=timeout,
                )
            except (dist.DistError, RuntimeError, ValueError) as error:
                full = said and said.keep(f"paceline-rank-{place.rank}-")
                raise MachineError(
                    f"rank {place.rank} of {place.world_size} did not meet the others: {error}",
                    where=f"{place.address}:{place.port}, backend {backend}" + (f"; full text: {full}" if full else ""),
                    hint="paceline train JOB --ranks 1 to see whether one process works",
                ) from error
        return World(
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            device=device,
            backend=backend,
            group=dist.group.WORLD,
            timeout_seconds=timeout_seconds,
            store=store,
        )

    def words(self) -> TCPStore:
        """Where ranks leave word for each other, each by itself; with another launcher's a rank connects when it asks.

        Raises:
            dist.DistError, RuntimeError: whoever keeps it is gone.
        """
        if self.store is None:
            place = LaunchInfo.read(os.environ)
            found = TCPStore(place.address, place.port or 0, is_master=False, timeout=_ASKED)
            object.__setattr__(self, "store", found)
        assert self.store is not None
        return self.store

    def part(self, groups: Sequence[Sequence[int]]) -> "World":
        """The world of those fellows of this rank that stand with it in one of `groups`; every rank calls this.

        Groups of one send nothing, and one of all is this world itself.
        """
        mine = next(list(ranks) for ranks in groups if self.rank in ranks)
        if len(mine) == self.world_size:
            return self
        known = tuple(map(tuple, groups))
        if known not in self.parts:
            self.parts[known] = self._part(groups, mine)
        return self.parts[known]

    def _part(self, groups: Sequence[Sequence[int]], mine: list[int]) -> "World":
        timeout = timedelta(seconds=self.timeout_seconds)
        made = [dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None for ranks in groups]
        group = next(one for one, ranks in zip(made, groups, strict=True) if self.rank in ranks)
        return replace(self, rank=mine.index(self.rank), world_size=len(mine), group=group, parts={})

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def sends(self, kind: str, tensor: torch.Tensor) -> None:
        """Count what is handed over to this group: `traffic.SHARES` has the kinds."""
        self.traffic.add(kind, tensor.nbytes, ranks=self.world_size)

    def all_reduce(self, tensor: torch.Tensor, *, op: Op = "sum") -> torch.Tensor:
        """Reduce in place over all ranks and return it."""
        if self.group is not None:
            self.sends("all_reduce", tensor)
            dist.all_reduce(tensor, op=_OPS[op], group=self.group)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, *, op: Op = "sum") -> Callable[[], object]:
        """Start an all-reduce in place; call what is returned to wait for it."""
        if self.group is None:
            return _nothing
        self.sends("all_reduce", tensor)
        return _waiting(dist.all_reduce(tensor, op=_OPS[op], group=self.group, async_op=True))

    def start_all_to_all(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        """Start to send row r of `source` to rank r, and to fill row r of `target` with what rank r sends here."""
        self.sends("all_to_all", source)
        return _waiting(dist.all_to_all_single(target, source, group=self.group, async_op=True))

    def start_send(self, tensor: torch.Tensor, *, to: int, tag: int) -> "PendingMessage":
        """Start to send to one rank, which receives with the same tag; the tensor must stay as it is until it left."""
        self.sends("send", tensor)
        return _started(dist.isend(tensor, group=self.group, group_dst=to, tag=tag))

    def start_receive(self, tensor: torch.Tensor, *, source: int, tag: int) -> "PendingMessage":
        """Start to fill a tensor with what one rank sends with this tag."""
        return _started(dist.irecv(tensor, group=self.group, group_src=source, tag=tag))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        """Copy `source`'s tensor over everybody's, in place."""
        if self.group is not None:
            self.sends("broadcast", tensor)
            dist.broadcast(tensor, group_src=source, group=self.group)
        return tensor

    def gather_json(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of ranks, on every rank. Plain JSON: nothing is pickled."""
        if self.group is None:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = own.numel()
        lengths = [int(size) for size in self.all_reduce(sizes)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: own.numel()] = own
        parts = [torch.empty_like(padded) for _ in lengths]
        self.sends("all_gather", padded)
        dist.all_gather(parts, padded, group=self.group)
        texts = [bytes(part[:size].cpu().numpy()) for part, size in zip(parts, lengths, strict=True)]
        return [json.loads(text) for text in texts]

    def share_json(self, value: Any, *, source: int = 0) -> Any:
        """`source`'s value, on every rank."""
        return self.gather_json(value if self.rank == source else None)[source]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Leave; every rank calls this once, last."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()
        self.let_go()

    def let_go(self) -> None:
        """Forget the group here and now, which may be another's to end: its threads must end before the interpreter."""
        if self.group is not None:
            for world in (self, *self.parts.values()):
                object.__setattr__(world, "group", None)
            object.__setattr__(self, "store", None)
            gc.collect()


def _store(place: LaunchInfo, timeout: timedelta) -> tuple[TCPStore | None, str | None]:
    """Our own launcher hands rank 0 a socket that listens already; others read the environment."""
    if own_environ(os.environ).get(LISTEN_FD) is None:
        return None, "env://"
    store = TCPStore(
        place.address,
        place.port or 0,
        world_size=place.world_size,
        is_master=place.listen_fd is not None,
        timeout=timeout,
        master_listen_fd=place.listen_fd,
    )
    return store, None


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    if local_rank >= torch.cuda.device_count():
        raise MachineError(
            f"rank wants GPU {local_rank}, this machine has {torch.cuda.device_count()}.",
            hint="--device cpu, or fewer --ranks",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _started(work: dist.Work | None) -> PendingMessage:
    assert work is not None
    return work


def _waiting(work: dist.Work | None) -> Callable[[], object]:
    return _started(work).wait


def _nothing() -> None:
    return None
