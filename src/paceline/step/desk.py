"""Where a server's loop and its workers meet: one lock around the books and the weights, one thread for each worker.

The threads only move bytes and write in the books. Updates are taken by the loop's own thread: what goes wrong with one
is an exception there, as in any other step.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.errors import DesyncError
from paceline.order.leases import Lease, Leases
from paceline.step.flat import flat_of, unpack_gradients
from paceline.step.line import Door, Kind, Line, LineLost, Message
from paceline.step.pushed import Push

_LEAVING_SECONDS = 5.0
_PATIENCE = 0.25  # of the time after which the other end would give up


@dataclass(frozen=True, kw_only=True)
class Held:
    """What workers are given: the trainable parameters with each lease, once the tensors that nothing updates.

    `model` tells models of other shapes apart.
    """

    weights: Sequence[Tensor] = field(repr=False)
    rest: Sequence[Tensor] = field(repr=False)
    model: str


class Desk:
    """The shared side. What has `lock` in its name or says so is called with it held."""

    def __init__(self, *, leases: Leases, held: Held, timeout_seconds: float) -> None:
        self.lock = threading.Condition()
        self.leases = leases
        self.held = held
        self.timeout_seconds = timeout_seconds
        self.pushes: dict[int, Push] = {}
        self.where: dict[int, Mapping[str, Any]] = {}
        self.names: dict[int, str] = {}
        self.notes: list[str] = []
        self.failure: Exception | None = None
        self.is_over = False
        self.alone_since = time.monotonic()
        self._flat = flat_of(held.weights)
        self._here: set[int] = set()
        self._clerks: list[threading.Thread] = []

    @property
    def num_workers(self) -> int:
        """How many are here."""
        return len(self._here)

    def open(self, door: Door) -> None:
        """Let workers in, from now on."""
        threading.Thread(target=self._watch, args=(door,), daemon=True, name="paceline-door").start()

    def close(self) -> None:
        """Tell all workers that it is over, and wait a moment for those that can be told."""
        with self.lock:
            self.is_over = True
            self.lock.notify_all()
        until = time.monotonic() + _LEAVING_SECONDS
        for clerk in self._clerks:
            clerk.join(max(0.0, until - time.monotonic()))

    def come(self, worker: int, *, rank: int, life: int, model: str) -> None:
        """A worker is here.

        Raises:
            DesyncError: it has built another model.
        """
        with self.lock:
            if model != self.held.model:
                raise DesyncError(
                    f"the worker of rank {rank} has built another model than the server.",
                    cause="code that builds, ties or freezes layers on some ranks only",
                    hint="the same model on every rank",
                )
            self._here.add(worker)
            self.names[worker] = f"worker {rank}"
            if life > 1:
                self.notes.append(f"rank {rank} is back, a worker as before")
            self.lock.notify_all()

    def go(self, worker: int, *, why: str) -> None:
        """A worker is not here any more: what it had not pushed whole is anybody's."""
        with self.lock:
            if worker not in self._here:
                return
            self._here.discard(worker)
            self.alone_since = time.monotonic()
            back = self.leases.lose(worker)
            if not self.is_over:
                lost = ", ".join(f"step {share.step + 1}'s part {share.number + 1} of {share.of}" for share in back)
                given = (
                    f"its unpushed gradient is lost, and {lost} goes to the next who asks" if back else "it had none"
                )
                self.notes.append(f"lost {self.names[worker]}, {why}: {given}")
            self.lock.notify_all()

    def lease(self, worker: int, *, row: Tensor) -> tuple[Lease, Mapping[str, Any]] | None:
        """A share for this worker, and in `row` the weights for it; None if none came up for a while, or it is over."""
        until = time.monotonic() + self.timeout_seconds * _PATIENCE
        with self.lock:
            while not self.is_over:
                lease = self.leases.grant(worker)
                if lease is not None:
                    self._flat.packed(self.held.weights, into=row)
                    self.lock.notify_all()
                    return lease, self.where[lease.share.step]
                if not self.lock.wait(until - time.monotonic()) or time.monotonic() >= until:
                    return None
        return None

    def push(self, lease: Lease, push: Push) -> None:
        """A share's gradient, whole."""
        with self.lock:
            self.leases.push(lease)
            self.pushes[lease.number] = push
            self.lock.notify_all()

    def row(self) -> Tensor:
        """Room for the weights."""
        return self._flat.row()

    def _watch(self, door: Door) -> None:
        while (number := _quietly(door.next)) is not None:
            clerk = threading.Thread(target=self._serve, args=(door, number), daemon=True, name=f"paceline-{number}")
            self._clerks.append(clerk)
            clerk.start()

    def _serve(self, door: Door, worker: int) -> None:
        try:
            self._talk(door.line(worker), worker)
            self.go(worker, why="it is over")
        except LineLost as error:
            self.go(worker, why=self._why(str(error).lower()))
        except Exception as error:  # the loop raises it
            with self.lock:
                self.failure = error
                self.lock.notify_all()

    def _talk(self, line: Line, worker: int) -> None:
        hello = line.receive().words
        self.come(worker, rank=hello["rank"], life=hello["life"], model=hello["model"])
        with self.lock:
            rest = flat_of(self.held.rest).packed(self.held.rest)
        line.send(Message(kind=Kind.REST, row=rest))
        row = self.row()
        while not self.is_over:
            found = self.lease(worker, row=row)
            if found is None:
                if not self.is_over:
                    line.send(Message(kind=Kind.WAIT))
                continue
            lease, where = found
            share = lease.share
            line.send(Message(kind=Kind.LEASE, words={**where, "number": share.number, "of": share.of}, row=row))
            self.push(lease, self._pushed(line.receive()))
        line.send(Message(kind=Kind.OVER))

    def _why(self, text: str) -> str:
        """What the library says, in short."""
        if "timed out" in text or "timeout" in text:
            return f"of which nothing was heard for {self.timeout_seconds:g} s"
        return "whose process is gone" if "closed" in text or "reset" in text else f"on whose line: {text[:80]}"

    def _pushed(self, message: Message) -> Push:
        words, row = message.words, message.row
        kinds, like = words["gradients"], self.held.weights
        return Push(
            gradients=[None] * len(kinds) if row is None else unpack_gradients(row, kinds=kinds, like=like),
            terms={int(index): {n: (t, c) for n, (t, c) in terms.items()} for index, terms in words["terms"].items()},
            divided=words["divided"],
            stop=words["stop"],
        )


def _quietly(ask: Callable[[], int | None]) -> int | None:
    """The store ends with the run, perhaps while somebody asks it."""
    try:
        return ask()
    except RuntimeError:
        return None
