"""The threads that serve workers, one per worker on each server: they transfer data and record leases and pushes."""

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.errors import DesyncError
from paceline.step.parameter_server.flat_buffers import flat_of, unpack_gradients
from paceline.step.parameter_server.pushed_gradients import GradientPush, from_words
from paceline.step.parameter_server.state import ServerState
from paceline.step.parameter_server.transport import (
    Connection,
    ConnectionAcceptor,
    ConnectionLost,
    Message,
    MessageKind,
)

_CLOSE_SECONDS = 5.0


class WorkerConnections:
    """The connections of one server to its workers. Only the first server (`leads`) leases shares."""

    def __init__(self, state: ServerState, *, acceptor: ConnectionAcceptor, leads: bool) -> None:
        self._state = state
        self._acceptor = acceptor
        self._leads = leads
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Start to accept workers."""
        threading.Thread(target=self._accept_workers, daemon=True, name="paceline-acceptor").start()

    def close(self) -> None:
        """Tell all workers that the run is over, and wait at most 5 seconds for the threads that serve them."""
        self._acceptor.is_closed = True
        self._state.end()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads if self._leads else ():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept_workers(self) -> None:
        while (number := call_unless_closed(self._acceptor.next)) is not None:
            thread = threading.Thread(target=self._serve_worker, args=(number,), daemon=True, name=f"paceline-{number}")
            self._threads.append(thread)
            thread.start()

    def _serve_worker(self, worker: int) -> None:
        try:
            connection = self._acceptor.connect(worker)
            self._handshake(connection, worker)
            self._serve_leases(connection, worker) if self._leads else self._serve_parts(connection)
            self._state.remove_worker(worker, why="the run is over")
        except ConnectionLost as error:
            self._state.remove_worker(worker, why=self._reason(str(error).lower()))
        except Exception as error:
            self._state.fail(error)

    def _reason(self, text: str) -> str:
        """Return a short form of gloo's error text."""
        if "timed out" in text or "timeout" in text:
            return f"which has not responded for {self._state.timeout_seconds:g} s"
        return (
            "whose process has ended"
            if "closed" in text or "reset" in text
            else f"whose connection failed: {text[:80]}"
        )

    def _handshake(self, connection: Connection, worker: int) -> None:
        fields = connection.receive().words
        self._state.add_worker(worker, rank=fields["rank"], start_number=fields["start_number"], model=fields["model"])
        while not self._state.wait_for_first_batch():
            if self._leads:  # a worker waits for the first server first
                connection.send(Message(kind=MessageKind.WAIT))
        with self._state.lock:
            fixed = flat_of(self._state.held.rest).packed(self._state.held.rest)
        connection.send(Message(kind=MessageKind.REST, words={"names": list(self._state.held.names)}, row=fixed))

    def _serve_leases(self, connection: Connection, worker: int) -> None:
        state, buffer = self._state, self._state.row()
        while not state.is_over:
            granted = state.lease(worker, row=buffer)
            if granted is None:
                if not state.is_over:
                    connection.send(Message(kind=MessageKind.WAIT))
                continue
            lease, location = granted
            lease_fields = {
                "lease": lease.number,
                "version": lease.version,
                "number": lease.share.number,
                "of": lease.share.of,
            }
            connection.send(Message(kind=MessageKind.LEASE, words={**location, **lease_fields}, row=buffer))
            state.push(lease, self._parse_push(connection.receive()))
        connection.send(Message(kind=MessageKind.OVER))

    def _serve_parts(self, connection: Connection) -> None:
        buffer = self._state.row()
        while True:
            message = connection.receive()
            if message.kind is MessageKind.PULL:
                version = self._state.weights_at(int(message.words["version"]), row=buffer)
                if version < int(message.words["version"]) and not self._state.is_over:
                    raise DesyncError("a worker requests the weights after an update that this server has not applied.")
                connection.send(Message(kind=MessageKind.LEASE, words={"version": version}, row=buffer))
            elif message.kind is MessageKind.PUSH:
                self._state.stage(int(message.words["lease"]), self._parse_push(message))
                connection.send(Message(kind=MessageKind.WAIT))

    def _parse_push(self, message: Message) -> GradientPush:
        fields, buffer = message.words, message.row
        if fields["order"] is not None:
            self._state.same_order(int(fields["epoch"]), *fields["order"])
        kinds: Sequence[int] = fields["gradients"]
        like: Sequence[Tensor] = self._state.held.weights
        gradients = [None] * len(kinds) if buffer is None else unpack_gradients(buffer, kinds=kinds, like=like)
        return from_words(fields, gradients=gradients)


def call_unless_closed(call: Callable[[], int | None]) -> int | None:
    """Return `call()`, or None if the store has closed: it closes at the end of the run, maybe during the call."""
    try:
        return call()
    except RuntimeError:
        return None
