"""A parameter server worker: lease a share, compute its gradient on the weights that came with it, push, repeat.

It has no loop and no optimizer state, and takes no decisions. It can be lost at any moment: a share that was not
pushed completely is given to another worker, or to this one after a restart.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import LaunchInfo, WorkerEntrance, World
from paceline.data.order.cursor import Cursor
from paceline.data.types import DatasetSummary, StepInput
from paceline.errors import JobError, MachineError
from paceline.faults import Faults, parse_faults
from paceline.launch.agent.shared_status import Pulse
from paceline.launch.agent.signals import stop_flag
from paceline.launch.failures.failure_record import at_step
from paceline.launch.inherited_environment import START_NUMBER, attempt_folder
from paceline.step.forward_backward import backward, forward, loss_for_backward
from paceline.step.parameter_server.flat_buffers import flat_of, kinds_of, pack_gradients
from paceline.step.parameter_server.model_state import fixed_tensors, model_digest
from paceline.step.parameter_server.transport import (
    CONNECT_SECONDS,
    Connection,
    ConnectionLost,
    Message,
    MessageKind,
    connect_to_server,
)
from paceline.step.step_totals import own_counts
from paceline.step.synchronous import writes_to
from paceline.torch_internals.private_api import tensor_version
from paceline.trainer.random_access_reading import leased_feed
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.prepare import PreparedJob

_TRIES = 3
_ANSWER_SECONDS = 30.0  # the wait for a server that is already running


class WorkerFinished(SystemExit):
    """The exit of a worker process, which has no training loop of its own."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.exit_code = code


def run_worker(ready: PreparedJob) -> int:
    """Compute shares until the server says that the run is over, and return the process's exit code.

    Raises:
        MachineError: the server has exited.
    """
    built = build_training_setup(job=ready.job, settings=ready.settings, plan=ready.plan, world=World.alone())
    return compute(ready, built, WorkerEntrance(place=LaunchInfo.read(os.environ)))


def compute(ready: PreparedJob, built: TrainingSetup, entrance: WorkerEntrance) -> int:
    """Compute shares on an already built model until the server says that the run is over, and return the exit code."""
    worker, seconds = ParameterServerWorker(ready, built), ready.settings.train.timeout_seconds

    def connections() -> list[Connection]:
        return [connect_to_server(entrance, server=n, timeout_seconds=seconds) for n in range(ready.plan.rule.servers)]

    limit, failed_tries = max(seconds, CONNECT_SECONDS), 0
    while True:
        done = worker.num_pushed
        try:
            worker.serve(_within(limit, connections), rank=entrance.place.rank)
            return 0
        except ConnectionLost as error:
            failed_tries = failed_tries + 1 if worker.num_pushed == done else 0
            limit = _ANSWER_SECONDS
            if failed_tries == _TRIES:
                raise MachineError(f"connection closed by the server: {error}") from error


def _within(seconds: float, ask: Callable[[], list[Connection]]) -> list[Connection]:
    """Return the result of `connect`, called in a thread: a request to the store of a stopped process blocks forever.

    Raises:
        MachineError: no result came within `seconds`.
    """
    found: list[list[Connection] | BaseException] = []

    def asked() -> None:
        try:
            found.append(ask())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise MachineError(f"timed out waiting for the server, after {seconds:.0f} seconds.")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class ParameterServerWorker:
    """The state of one worker: its model, loader and connections to the servers."""

    def __init__(self, ready: PreparedJob, built: TrainingSetup) -> None:
        self._built = built
        self._replica = built.step.replica
        self._named = list(built.update.named)
        self._servers: list[_ServerConnection] = []
        self.num_pushed = 0
        self._reporter = self._replica.loss_reporter(tells=True)
        self._seen = False
        self._faulted_step = 0
        self._sums_shares = ready.plan.rule.staleness == 0
        settings, job, task = ready.settings, built.job, ready.task
        self._feed = leased_feed(job, settings, global_batch_size=ready.plan.global_batch_size)
        start_number = int(os.environ.get(START_NUMBER, "1"))
        faults = parse_faults(task.faults) if start_number == 1 else ()
        self._start_number = start_number
        self._faults = Faults(faults, rank=LaunchInfo.read(os.environ).rank, attempt=task.attempt)
        folder = attempt_folder(os.environ)
        place, patience = LaunchInfo.read(os.environ), settings.train.timeout_seconds
        self._pulse = Pulse(folder / f"pulse-{place.rank}", patience=patience) if folder else None

    def serve(self, connections: Sequence[Connection], *, rank: int) -> None:
        """Compute the leases of the first server one after another. Each server holds a part of the weights.

        Raises:
            ConnectionLost: a server has exited, or has given up this worker.
        """
        hello = {"rank": rank, "start_number": self._start_number, "model": model_digest(self._replica.model)}
        for connection in connections:
            connection.send(Message(kind=MessageKind.HELLO, words=hello))
        self._servers = [self._greet(connection, _first_reply(connection)) for connection in connections]
        first, *others = self._servers
        while True:
            message = first.connection.receive(row=first.row)
            if message.kind is MessageKind.OVER:
                return
            if message.kind is MessageKind.LEASE:
                self._lease(message, first, others)
            for other in others if message.kind is MessageKind.WAIT else ():
                other.connection.send(message)

    def _lease(self, message: Message, first: "_ServerConnection", others: "Sequence[_ServerConnection]") -> None:
        """Compute and push one lease. The first server's push comes last, because only then does the lease count."""
        words = message.words
        versions = [first.load(message)]
        for other in others:
            other.connection.send(Message(kind=MessageKind.PULL, words={"version": words["version"]}))
            versions.append(other.load(other.connection.receive(row=other.row)))
        with at_step(int(words["cursor"]["step"]) + 1):
            told = self._share(words)
        for server in [*others, first]:
            gradients = [_coalesced(weight.grad) for weight in server.weights]
            own = {**told, "lease": words["lease"], "versions": versions, "gradients": kinds_of(gradients)}
            server.connection.send(Message(kind=MessageKind.PUSH, words=own, row=pack_gradients(gradients)))
            if server is not first:
                server.connection.receive()
        self.num_pushed += 1

    def _greet(self, connection: Connection, message: Message) -> "_ServerConnection":
        """Copy the server's frozen tensors and buffers, and return its connection with the weights that it holds."""
        fixed = fixed_tensors(self._replica.model)
        if message.row is not None:
            for tensor, value in zip(fixed, flat_of(fixed).views(message.row), strict=True):
                tensor.data.copy_(value)
        self._replica.buffers.begin()
        mine = {member.name: member.parameter for member in self._named}
        return _ServerConnection(connection, [mine[name] for name in message.words["names"]])

    def _share(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the gradient of a share into every `.grad`, and return its loss terms."""
        cursor = Cursor.from_json(words["cursor"])
        stop_flag.renew()
        self._fire_faults(cursor.step + 1)
        read = partial(self._feed.share, cursor, micro_batch_size=int(words["micro_batch_size"]))
        if "summary" in words:
            seen = words["summary"]
            summary = DatasetSummary(
                num_samples=seen["num_samples"], samples=tuple(seen["samples"]), checksum=seen["checksum"]
            )
            self._feed.compare(int(words["epoch"]), summary, rank=LaunchInfo.read(os.environ).rank)
        given = read(number=int(words["number"]), of=int(words["of"]))
        counts = self._counts(given, whole=read)
        terms = self._gradients(given, step=cursor.step, counts=counts)
        if self._pulse is not None:
            self._pulse.beat(step=cursor.step + 1)
        told = {"epoch": given.batch.after.epoch, "order": self._feed.order_of(given.batch.after.epoch)}
        by = None if counts is None else {name: float(count) for name, count in counts.items()}
        return {**told, "terms": terms, "divided_by": by, "stop": stop_flag.requested}

    def _fire_faults(self, step: int) -> None:
        """Fire the injected faults up to this step, even if another worker gets the share of that step."""
        while self._faulted_step < step:
            self._faulted_step += 1
            self._faults.fire("step", step=self._faulted_step)

    def _counts(self, given: StepInput, *, whole: Any) -> dict[str, Tensor] | None:
        """Return the counts of targets, if the job computes them before the forward.

        They cover the whole batch if the batch is one update, else this share.
        """
        if not self._replica.contract.counts_first:
            return None
        if self._sums_shares and len(given.micro) < given.num_micro:
            given = whole()
        found = own_counts(self._replica.contract, [micro.data for micro in given.micro])
        return {name: torch.as_tensor(count) for name, count in found.items()}

    def _gradients(
        self, given: StepInput, *, step: int, counts: dict[str, Tensor] | None
    ) -> dict[int, dict[str, tuple[float, float]]]:
        """Run forward and backward of each microbatch, and return its loss terms."""
        replica = self._replica
        replica.model.train()
        replica.reducer.begin()
        before = [] if self._seen else [tensor_version(parameter) for parameter in replica.model.parameters()]
        told: dict[int, dict[str, tuple[float, float]]] = {}
        for position, micro in enumerate(given.micro):
            portion = replica.load(micro.data)
            terms = forward(replica, portion, step=step, index=micro.index, num_samples=micro.num_samples)
            self._reporter.agree(terms)
            told[micro.index] = {name: (float(total.detach()), float(count)) for name, (total, count) in terms.items()}
            backward(replica, loss_for_backward(terms, counts), last=position == len(given.micro) - 1)
        self._refuse_writes(before)
        return told

    def _refuse_writes(self, before: Sequence[int]) -> None:
        """Raise a JobError if the forward writes to parameters or buffers, because no other process sees the change."""
        pairs = zip(self._replica.model.named_parameters(), before, strict=False)
        for name in [name for (name, parameter), old in pairs if tensor_version(parameter) != old]:
            raise writes_to(name)
        written = self._replica.buffers.written()
        if written:
            raise JobError(
                f"the forward writes to the buffer {written[0]}: --update ps has no single order of microbatches.",
                cause="a counter or a statistic that is kept from forward to forward, on one worker only",
                hint="--update sync",
            )
        self._seen = True


class _ServerConnection:
    """The connection to one server, and this worker's copies of the weights that the server holds."""

    def __init__(self, connection: Connection, weights: Sequence[Tensor]) -> None:
        self.connection = connection
        self.weights = list(weights)
        self._flat = flat_of(weights)
        self.row = self._flat.row()

    def load(self, message: Message) -> int:
        """Copy the pulled values into the weights, and return their version."""
        if message.row is not None:
            for tensor, value in zip(self.weights, self._flat.views(message.row), strict=True):
                tensor.data.copy_(value)
        return int(message.words["version"])


def _coalesced(gradient: Tensor | None) -> Tensor | None:
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def _first_reply(connection: Connection) -> Message:
    """Return the reply to this worker's hello, once the servers begin."""
    while (message := connection.receive()).kind is MessageKind.WAIT:
        pass
    return message
