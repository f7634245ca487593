"""The threads that serve workers, one per worker on each server: they move bytes, record leases and decide nothing."""

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.errors import DesyncError
from paceline.step.parameter_server.flat_buffers import flat_of, unpack_gradients
from paceline.step.parameter_server.gradients import GradientPush, from_words
from paceline.step.parameter_server.state import ServerState
from paceline.step.parameter_server.transport import Connection, ConnectionAcceptor, LineLost, Message, MessageKind

_LEAVING_SECONDS = 5.0


class WorkerConnections:
    """The connections of one server. The first server (`leads`) leases shares; the others exchange their parts."""

    def __init__(self, desk: ServerState, *, door: ConnectionAcceptor, leads: bool) -> None:
        self._desk = desk
        self._door = door
        self._leads = leads
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Start to accept workers."""
        threading.Thread(target=self._watch, daemon=True, name="paceline-door").start()

    def close(self) -> None:
        """Tell all workers that the run is over, and wait briefly for those that can be reached."""
        self._door.is_closed = True
        self._desk.end()
        until = time.monotonic() + _LEAVING_SECONDS
        for thread in self._threads if self._leads else ():
            thread.join(max(0.0, until - time.monotonic()))

    def _watch(self) -> None:
        while (number := _quietly(self._door.next)) is not None:
            thread = threading.Thread(target=self._serve, args=(number,), daemon=True, name=f"paceline-{number}")
            self._threads.append(thread)
            thread.start()

    def _serve(self, worker: int) -> None:
        try:
            line = self._door.line(worker)
            self._meet(line, worker)
            self._lease(line, worker) if self._leads else self._follow(line)
            self._desk.go(worker, why="it is over")
        except LineLost as error:
            self._desk.go(worker, why=self._why(str(error).lower()))
        except Exception as error:
            self._desk.fail(error)

    def _why(self, text: str) -> str:
        """Return a short form of the library's error text."""
        if "timed out" in text or "timeout" in text:
            return f"which has not responded for {self._desk.timeout_seconds:g} s"
        return (
            "whose process has ended"
            if "closed" in text or "reset" in text
            else f"whose connection failed: {text[:80]}"
        )

    def _meet(self, line: Connection, worker: int) -> None:
        hello = line.receive().words
        self._desk.come(worker, rank=hello["rank"], life=hello["life"], model=hello["model"])
        while not self._desk.begins():
            if self._leads:  # a worker waits for the first server first
                line.send(Message(kind=MessageKind.WAIT))
        with self._desk.lock:
            rest = flat_of(self._desk.held.rest).packed(self._desk.held.rest)
        line.send(Message(kind=MessageKind.REST, words={"names": list(self._desk.held.names)}, row=rest))

    def _lease(self, line: Connection, worker: int) -> None:
        desk, row = self._desk, self._desk.row()
        while not desk.is_over:
            found = desk.lease(worker, row=row)
            if found is None:
                if not desk.is_over:
                    line.send(Message(kind=MessageKind.WAIT))
                continue
            lease, where = found
            told = {"lease": lease.number, "version": lease.version, "number": lease.share.number, "of": lease.share.of}
            line.send(Message(kind=MessageKind.LEASE, words={**where, **told}, row=row))
            desk.push(lease, self._read(line.receive()))
        line.send(Message(kind=MessageKind.OVER))

    def _follow(self, line: Connection) -> None:
        row = self._desk.row()
        while True:
            message = line.receive()
            if message.kind is MessageKind.PULL:
                version = self._desk.weights_at(int(message.words["version"]), row=row)
                if version < int(message.words["version"]) and not self._desk.is_over:
                    raise DesyncError("the first server has given a lease on weights that this server never had.")
                line.send(Message(kind=MessageKind.LEASE, words={"version": version}, row=row))
            elif message.kind is MessageKind.PUSH:
                self._desk.stage(int(message.words["lease"]), self._read(message))
                line.send(Message(kind=MessageKind.WAIT))

    def _read(self, message: Message) -> GradientPush:
        words, row = message.words, message.row
        if words["order"] is not None:
            self._desk.same_order(int(words["epoch"]), *words["order"])
        kinds: Sequence[int] = words["gradients"]
        like: Sequence[Tensor] = self._desk.held.weights
        gradients = [None] * len(kinds) if row is None else unpack_gradients(row, kinds=kinds, like=like)
        return from_words(words, gradients=gradients)


def _quietly(ask: Callable[[], int | None]) -> int | None:
    """Return `ask()`, or None if the store has closed: it ends with the run, perhaps during the call."""
    try:
        return ask()
    except RuntimeError:
        return None
