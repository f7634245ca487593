"""The threads of a server, one for each worker: they transfer weights and gradients, and record leases and pushes."""

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.errors import DesyncError
from paceline.step.parameter_server.flat_buffers import layout_of, unpack_gradients
from paceline.step.parameter_server.push_messages import GradientPush, push_from_json
from paceline.step.parameter_server.state import ServerState
from paceline.step.parameter_server.transport import (
    Connection,
    ConnectionAcceptor,
    ConnectionLost,
    MessageKind,
    ServerMessage,
)

_CLOSE_SECONDS = 5.0


class ServerThreads:
    """The threads that serve the workers of one server, each with its own connection.

    Only the first server leases shares of a batch. The other servers send their weights to the workers, and receive the
    gradients of these weights.
    """

    def __init__(self, state: ServerState, *, acceptor: ConnectionAcceptor, is_first_server: bool) -> None:
        self._state = state
        self._acceptor = acceptor
        self._is_first_server = is_first_server
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Start to accept workers."""
        threading.Thread(target=self._accept_workers, daemon=True, name="paceline-acceptor").start()

    def close(self) -> None:
        """End the run for all workers. On the first server, wait up to 5 seconds for the threads that tell them so."""
        self._acceptor.is_closed = True
        self._state.end_run()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads if self._is_first_server else ():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept_workers(self) -> None:
        while (number := call_unless_closed(self._acceptor.wait_for_worker)) is not None:
            thread = threading.Thread(target=self._serve_worker, args=(number,), daemon=True, name=f"paceline-{number}")
            self._threads.append(thread)
            thread.start()

    def _serve_worker(self, worker: int) -> None:
        """Serve one worker until the run is over or the connection is lost."""
        try:
            connection = self._acceptor.connect(worker)
            self._handshake(connection, worker)
            if self._is_first_server:
                self._serve_leases(connection, worker)
            else:
                self._serve_pulls_and_pushes(connection)
            self._state.remove_worker(worker, reason="the run is over")
        except ConnectionLost as error:
            self._state.remove_worker(worker, reason=self._describe_lost_connection(str(error).lower()))
        except Exception as error:
            self._state.store_failure(error)

    def _describe_lost_connection(self, text: str) -> str:
        """Return why a connection was lost, as a clause for a note. `text` is gloo's error text in lower case."""
        if "timed out" in text or "timeout" in text:
            return f"which has not responded for {self._state.timeout_seconds:g} s"
        return (
            "whose process has ended"
            if "closed" in text or "reset" in text
            else f"whose connection failed: {text[:80]}"
        )

    def _handshake(self, connection: Connection, worker: int) -> None:
        """Register the worker, wait for the first batch, and send the tensors that no update changes.

        The worker's `start_number` is 1 at the first start of its process, and one more after each restart.
        """
        fields = connection.receive().fields
        self._state.add_worker(worker, rank=fields["rank"], start_number=fields["start_number"], digest=fields["model"])
        while not self._state.wait_for_first_batch():
            if self._is_first_server:  # a worker reads the other servers' messages only after the first server's FIXED
                connection.send(ServerMessage(kind=MessageKind.WAIT))
        with self._state.lock:
            fixed = layout_of(self._state.served.fixed).pack(self._state.served.fixed)
        connection.send(
            ServerMessage(kind=MessageKind.FIXED, fields={"names": list(self._state.served.names)}, buffer=fixed)
        )

    def _serve_leases(self, connection: Connection, worker: int) -> None:
        """Lease shares to this worker, one after another, and store its pushes, until the run is over."""
        state, buffer = self._state, self._state.weights_buffer()
        while not state.is_over:
            granted = state.lease_share(worker, buffer=buffer)
            if granted is None:
                if not state.is_over:
                    connection.send(ServerMessage(kind=MessageKind.WAIT))
                continue
            lease, sample_location = granted  # where in the data the worker reads the batch's samples
            lease_fields = {
                "lease": lease.number,
                "version": lease.version,
                "number": lease.share.number,
                "num_shares": lease.share.num_shares,
            }
            fields = {**sample_location, **lease_fields}
            connection.send(ServerMessage(kind=MessageKind.LEASE, fields=fields, buffer=buffer))
            state.store_push(lease, self._parse_push(connection.receive()))
        connection.send(ServerMessage(kind=MessageKind.OVER))

    def _serve_pulls_and_pushes(self, connection: Connection) -> None:
        """Send weights to a worker and store its pushes, on a server that is not the first.

        LEASE messages from this server have weights, but no share. The answer WAIT only confirms that a push was
        received. A WAIT from the worker shows that the worker is alive, and needs no answer.
        """
        buffer = self._state.weights_buffer()
        while True:
            message = connection.receive()
            if message.kind is MessageKind.PULL:
                version = self._state.pack_version(int(message.fields["version"]), buffer=buffer)
                if version < int(message.fields["version"]) and not self._state.is_over:
                    raise DesyncError("a worker requests the weights after an update that this server has not applied.")
                connection.send(ServerMessage(kind=MessageKind.LEASE, fields={"version": version}, buffer=buffer))
            elif message.kind is MessageKind.PUSH:
                self._state.store_part(int(message.fields["lease"]), self._parse_push(message))
                connection.send(ServerMessage(kind=MessageKind.WAIT))

    def _parse_push(self, message: ServerMessage) -> GradientPush:
        """Return the push in a message, after a check of the worker's order of samples."""
        fields, buffer = message.fields, message.buffer
        if fields["order"] is not None:
            self._state.check_order(int(fields["epoch"]), *fields["order"])
        codes: Sequence[int] = fields["gradients"]
        like: Sequence[Tensor] = self._state.served.weights
        gradients = [None] * len(codes) if buffer is None else unpack_gradients(buffer, codes=codes, like=like)
        return push_from_json(fields, gradients=gradients)


def call_unless_closed(call: Callable[[], int | None]) -> int | None:
    """Return `call()`, or None if the rendezvous store is closed because the run has ended."""
    try:
        return call()
    except RuntimeError:
        return None
