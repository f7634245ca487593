"""Streams for tests, and replicas as threads that agree with each other."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from paceline.data.loader import BatchLoader, make_loader
from paceline.data.order.cursor import Cursor
from paceline.data.order.virtual_shards import block_sizes
from paceline.data.types import BatchPartition


class Files:
    """The protocol of a sharded stream in its smallest form: files of numbers, and a state of two counts."""

    def __init__(self, lengths: list[int], *, spread: int = 1000) -> None:
        self.files = [[spread * f + i for i in range(n)] for f, n in enumerate(lengths)]
        self.num_shards = len(lengths)
        self.epoch = 0
        self.place = {"file": 0, "line": 0}
        self.opened = 0
        self.reads: list[int] = []

    def shard(self, num_shards: int, index: int) -> "Files":
        part = self.__class__([], spread=0)
        part.files = self.files[index::num_shards]
        part.num_shards = len(part.files)
        part.reads = self.reads
        return part

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return dict(self.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = dict(state)

    def value(self, number: int) -> Any:
        return torch.tensor(number + 100_000 * self.epoch)

    def __iter__(self) -> Iterator[Any]:
        while self.place["file"] < len(self.files):
            lines = self.files[self.place["file"]]
            while self.place["line"] < len(lines):
                number = lines[self.place["line"]]
                self.place["line"] += 1
                self.reads.append(number)
                yield self.value(number)
            self.place = {"file": self.place["file"] + 1, "line": 0}


class Buffered(Files):
    """A shuffle buffer that the state does not hold, as in the libraries that people use."""

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        generator = torch.Generator().manual_seed(self.epoch)
        for value in super().__iter__():
            waiting.append(value)
            if len(waiting) == 7:
                yield waiting.pop(int(torch.randint(7, (), generator=generator)))
        yield from waiting


class Remembered(Files):
    """A shuffle buffer that the state does hold: tensors, bytes and tuples in it."""

    def __init__(self, lengths: list[int], *, spread: int = 1000) -> None:
        super().__init__(lengths, spread=spread)
        self.waiting: list[Any] = []
        self.generator = torch.Generator().manual_seed(1)

    def state_dict(self) -> dict[str, Any]:
        return {**self.place, "waiting": tuple(self.waiting), "generator": self.generator.get_state(), "b": b"x", 3: 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert isinstance(state["waiting"], tuple) and state["b"] == b"x" and state[3] == 1  # type: ignore[index]
        self.place = {name: state[name] for name in ("file", "line")}
        self.waiting = list(state["waiting"])
        self.generator.set_state(state["generator"])

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            self.waiting.append(value)
            if len(self.waiting) == 7:
                yield self.waiting.pop(int(torch.randint(7, (), generator=self.generator)))
        while self.waiting:
            yield self.waiting.pop(0)


@dataclass
class Told:
    """What one replica was given: `(step, microbatch) -> (positions, values)`, and its state at the end."""

    micro: dict[tuple[int, int], tuple[tuple[int, ...], list[Any]]]
    state: dict[str, Any]
    cursor: Cursor
    notes: list[str]


def read_together(
    make: Callable[[], Any],
    *,
    replicas: int,
    steps: int,
    batch: int = 12,
    micro: int = 5,
    workers: int = 0,
    cursor: Cursor | None = None,
    state: Mapping[str, Any] | None = None,
    drop_last: bool = False,
    shards: int | None = None,
    collate: Any = None,
) -> list[Told]:
    """Replicas as threads, each with a dataset of its own; the first error of any is raised.

    They take turns, one at a time between two words to each other: data workers are forked, and what another thread
    holds at that moment (the generator that torch draws from) would be held in them for ever.
    """
    barrier, turn = threading.Barrier(replicas, timeout=60), threading.Lock()
    said: list[Any] = [None] * replicas
    found: list[Told | None] = [None] * replicas
    errors: list[BaseException] = []

    def run(replica: int) -> None:
        def agree(value: Any) -> list[Any]:
            said[replica] = value
            meet()
            values = list(said)
            meet()
            return values

        def meet() -> None:
            turn.release()
            try:
                barrier.wait()
            finally:
                turn.acquire()

        cut = BatchPartition(
            global_batch_size=batch, micro_batch_size=micro, replica=replica, replicas=replicas, drop_last=drop_last
        )
        turn.acquire()
        try:
            feed = make_loader(
                data=make(), collate=collate, order=None, seed=3, partition=cut, cursor=cursor or Cursor(), workers=workers,
                sample_seeds="never" if replicas > 1 else "auto", shards=shards, gather_json=agree,
            )  # fmt: skip
            with closing(feed):
                found[replica] = _drain(feed, steps=steps, cursor=cursor or Cursor(), state=state)
        except BaseException as error:
            errors.append(error)
            barrier.abort()
        finally:
            turn.release()

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if real or errors:
        raise (real or errors)[0]
    return [told for told in found if told is not None]


def _drain(feed: BatchLoader, *, steps: int, cursor: Cursor, state: Mapping[str, Any] | None) -> Told:
    if state is not None:
        feed.restore(state)
    told = Told({}, {}, cursor, list(feed.notes))
    for _, given in zip(range(steps), feed, strict=False):
        told.cursor = given.batch.next_cursor
        told.notes += given.notes
        for part in given.micro:
            told.micro[given.batch.next_cursor.step, part.index] = (part.indices, part.data.tolist())
    told.state = dict(feed.state())
    return told


def joined(told: list[Told]) -> dict[tuple[int, int], tuple[tuple[int, ...], list[Any]]]:
    """What all replicas were given, none twice."""
    whole: dict[tuple[int, int], tuple[tuple[int, ...], list[Any]]] = {}
    for one in told:
        assert not set(whole) & set(one.micro)
        whole |= one.micro
    return whole


def naive_order(shards: list[list[int]], batch: int) -> list[list[int]]:
    """The global batches in the plainest way: cut into blocks over the shards that are left, then fill up."""
    left = [list(shard) for shard in shards]
    batches = []
    while any(left):
        rows: list[list[int]] = [[] for _ in left]
        while (wanted := batch - sum(map(len, rows))) and any(left):
            live = [k for k in range(len(left)) if left[k]]
            for k, share in zip(live, block_sizes(wanted, len(live)), strict=True):
                rows[k] += left[k][:share]
                left[k] = left[k][share:]
        batches.append([value for row in rows for value in row])
    return batches
