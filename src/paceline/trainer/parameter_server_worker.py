"""A parameter server's worker: it leases a share of a batch, computes the share's gradient, and pushes the gradient.

The gradient is computed on the weights that come with the lease.

A worker has no training loop and no optimizer state, and makes no decisions. It can be lost at any moment: a share that
was not pushed completely is given to another worker, or to the same worker after its restart.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import LaunchInfo, WorkerEndpoint, World
from paceline.data.order.cursor import Cursor
from paceline.data.types import DatasetSummary, StepInput
from paceline.errors import JobError, MachineError
from paceline.faults import Faults, parse_faults
from paceline.launch.agent.shared_status import open_heartbeat
from paceline.launch.agent.signals import stop_flag
from paceline.launch.failures.failure_record import annotate_step
from paceline.launch.inherited_environment import START_NUMBER
from paceline.step.forward_backward import backward, forward, loss_for_backward
from paceline.step.parameter_server.flat_buffers import gradient_codes, layout_of, pack_gradients
from paceline.step.parameter_server.served_tensors import fixed_tensors, model_digest
from paceline.step.parameter_server.transport import (
    CONNECT_SECONDS,
    Connection,
    ConnectionLost,
    MessageKind,
    ServerMessage,
    connect_to_server,
)
from paceline.step.step_totals import local_counts
from paceline.step.synchronous import parameter_write_error
from paceline.torch_internals.private_api import tensor_version
from paceline.trainer.fault_injection import command_pid
from paceline.trainer.random_access_reading import random_access_loader
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.prepare import PreparedJob

_MAX_TRIES = 3
_RECONNECT_SECONDS = 30.0  # the longest wait for new connections after a connection was lost


class WorkerFinished(SystemExit):
    """The exit of a worker process, which has no training loop of its own."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.exit_code = code


def run_worker(prepared_job: PreparedJob) -> int:
    """Compute shares until the server says that the run is over, and return the process's exit code.

    Raises:
        MachineError: the server has exited.
    """
    setup = build_training_setup(
        job=prepared_job.job, settings=prepared_job.settings, plan=prepared_job.plan, world=World.alone()
    )
    return compute_shares(prepared_job, setup, WorkerEndpoint(launch_info=LaunchInfo.read(os.environ)))


def compute_shares(prepared_job: PreparedJob, setup: TrainingSetup, endpoint: WorkerEndpoint) -> int:
    """Compute shares on an already built model until the server says that the run is over, and return the exit code."""
    worker, seconds = ParameterServerWorker(prepared_job, setup), prepared_job.settings.train.timeout_seconds

    def connections() -> list[Connection]:
        return [
            connect_to_server(endpoint, server=n, timeout_seconds=seconds)
            for n in range(prepared_job.plan.update_rule.servers)
        ]

    limit, failed_tries = max(seconds, CONNECT_SECONDS), 0
    while True:
        num_pushed_before = worker.num_pushed
        try:
            worker.serve(_call_with_timeout(limit, connections), rank=endpoint.launch_info.rank)
            return 0
        except ConnectionLost as error:
            failed_tries = failed_tries + 1 if worker.num_pushed == num_pushed_before else 0
            limit = _RECONNECT_SECONDS
            if failed_tries == _MAX_TRIES:
                raise MachineError(f"connection closed by the server: {error}") from error


def _call_with_timeout(seconds: float, connect: Callable[[], list[Connection]]) -> list[Connection]:
    """Return the result of `connect`. It runs in a thread, because it blocks forever if the server is stopped.

    Raises:
        MachineError: `connect` did not return within `seconds`.
    """
    results: list[list[Connection] | BaseException] = []

    def call() -> None:
        try:
            results.append(connect())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise MachineError(f"timed out waiting for the server, after {seconds:.0f} seconds.")
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


class ParameterServerWorker:
    """The state of one worker: its model, loader and connections to the servers."""

    def __init__(self, prepared_job: PreparedJob, setup: TrainingSetup) -> None:
        self._setup = setup
        self._replica = setup.step.replica
        self._named_parameters = list(setup.update.named_parameters)
        self._servers: list[_ServerConnection] = []
        self.num_pushed = 0
        self._totals_builder = self._replica.make_totals_builder(reports_loss=True)
        self._has_checked_writes = False
        self._faulted_step = 0  # the faults injected into steps up to this one have fired
        self._sums_shares = prepared_job.plan.update_rule.staleness == 0
        settings, job, task = prepared_job.settings, setup.job, prepared_job.task
        self._loader = random_access_loader(job, settings, global_batch_size=prepared_job.plan.global_batch_size)
        start_number = int(os.environ.get(START_NUMBER, "1"))
        faults = parse_faults(task.faults) if start_number == 1 else ()
        self._start_number = start_number
        pid = command_pid(faults, Path(task.run))
        self._faults = Faults(faults, rank=LaunchInfo.read(os.environ).rank, attempt=task.attempt, command_pid=pid)
        self._heartbeat = open_heartbeat(LaunchInfo.read(os.environ).rank, settings)

    def serve(self, connections: Sequence[Connection], *, rank: int) -> None:
        """Compute the shares that the first server leases, one after another. Each server holds some of the weights.

        Raises:
            ConnectionLost: a server has exited, or has dropped this worker.
        """
        hello = {"rank": rank, "start_number": self._start_number, "model": model_digest(self._replica.model)}
        for connection in connections:
            connection.send(ServerMessage(kind=MessageKind.HELLO, fields=hello))
        self._servers = [
            self._receive_initial_state(connection, _first_reply(connection)) for connection in connections
        ]
        first_server, *other_servers = self._servers
        while True:
            message = first_server.connection.receive(buffer=first_server.buffer)
            if message.kind is MessageKind.OVER:
                return
            if message.kind is MessageKind.LEASE:
                self._compute_lease(message, first_server, other_servers)
            for other in other_servers if message.kind is MessageKind.WAIT else ():
                other.connection.send(message)

    def _compute_lease(
        self, message: ServerMessage, first_server: "_ServerConnection", other_servers: "Sequence[_ServerConnection]"
    ) -> None:
        """Compute and push the gradient of one lease. The last push is to the first server and completes the lease."""
        lease = message.fields
        versions = [first_server.load(message)]
        for other in other_servers:
            other.connection.send(ServerMessage(kind=MessageKind.PULL, fields={"version": lease["version"]}))
            versions.append(other.load(other.connection.receive(buffer=other.buffer)))
        with annotate_step(int(lease["cursor"]["step"]) + 1):
            share_report = self._compute_share(lease)
        for server in [*other_servers, first_server]:
            gradients = [_coalesce(weight.grad) for weight in server.weights]
            push = {
                **share_report,
                "lease": lease["lease"],
                "versions": versions,
                "gradients": gradient_codes(gradients),  # which are absent, dense or sparse
            }
            server.connection.send(ServerMessage(kind=MessageKind.PUSH, fields=push, buffer=pack_gradients(gradients)))
            if server is not first_server:
                server.connection.receive()
        self.num_pushed += 1

    def _receive_initial_state(self, connection: Connection, message: ServerMessage) -> "_ServerConnection":
        """Copy the server's frozen parameters and buffers into the model, and return the server's connection."""
        fixed = fixed_tensors(self._replica.model)
        if message.buffer is not None:
            for tensor, value in zip(fixed, layout_of(fixed).views(message.buffer), strict=True):
                tensor.data.copy_(value)
        self._replica.buffers.accept_current_values()
        parameters = {member.name: member.parameter for member in self._named_parameters}
        return _ServerConnection(connection, [parameters[name] for name in message.fields["names"]])

    def _compute_share(self, lease: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the gradient of a share into every `.grad`. Return the fields of its push that all servers get."""
        cursor = Cursor.from_json(lease["cursor"])
        stop_flag.reinstall()
        self._fire_faults(cursor.step + 1)
        read = partial(self._loader.read_share, cursor, micro_batch_size=int(lease["micro_batch_size"]))
        if "summary" in lease:
            server_summary = lease["summary"]
            summary = DatasetSummary(
                num_samples=server_summary["num_samples"],
                samples=tuple(server_summary["samples"]),
                checksum=server_summary["checksum"],
            )
            self._loader.compare_data(int(lease["epoch"]), summary, rank=LaunchInfo.read(os.environ).rank)
        step_batch = read(number=int(lease["number"]), num_shares=int(lease["num_shares"]))
        counts = self._count_targets(step_batch, read_batch=read)
        terms = self._compute_gradients(step_batch, step=cursor.step, counts=counts)
        if self._heartbeat is not None:
            self._heartbeat.write(step=cursor.step + 1)
        data_report = {
            "epoch": step_batch.batch.next_cursor.epoch,
            "order": self._loader.order_checksum(step_batch.batch.next_cursor.epoch),
        }
        divisors = None if counts is None else {name: float(count) for name, count in counts.items()}
        return {**data_report, "terms": terms, "divided_by": divisors, "stop": stop_flag.is_requested}

    def _fire_faults(self, step: int) -> None:
        """Fire the injected faults of all steps up to this one, even of steps whose shares other workers got."""
        while self._faulted_step < step:
            self._faulted_step += 1
            self._faults.fire("step", step=self._faulted_step)

    def _count_targets(self, step_batch: StepInput, *, read_batch: Any) -> dict[str, Tensor] | None:
        """Return the counts of targets, or None if the job does not compute them before the forward.

        If the batch is one update, the counts cover the whole batch. Otherwise they cover this share.
        """
        if not self._replica.contract.has_early_counts:
            return None
        if self._sums_shares and len(step_batch.micro) < step_batch.num_micro:
            step_batch = read_batch()
        counts = local_counts(self._replica.contract, [micro.data for micro in step_batch.micro])
        return {name: torch.as_tensor(count) for name, count in counts.items()}

    def _compute_gradients(
        self, step_batch: StepInput, *, step: int, counts: dict[str, Tensor] | None
    ) -> dict[int, dict[str, tuple[float, float]]]:
        """Run forward and backward of each microbatch, and return the loss terms by microbatch index."""
        replica = self._replica
        replica.model.train()
        replica.reducer.begin()
        versions = (
            [] if self._has_checked_writes else [tensor_version(parameter) for parameter in replica.model.parameters()]
        )
        terms_by_microbatch: dict[int, dict[str, tuple[float, float]]] = {}
        for position, microbatch in enumerate(step_batch.micro):
            index, num_samples = microbatch.index, microbatch.num_samples
            local_microbatch = replica.load_microbatch(microbatch.data)
            terms = forward(replica, local_microbatch, step=step, index=index, num_samples=num_samples)
            self._totals_builder.agree_on_names(terms)
            terms_by_microbatch[index] = {
                name: (float(total.detach()), float(count)) for name, (total, count) in terms.items()
            }
            backward(replica, loss_for_backward(terms, counts), last=position == len(step_batch.micro) - 1)
        self._refuse_writes(versions)
        return terms_by_microbatch

    def _refuse_writes(self, versions: Sequence[int]) -> None:
        """Raise a JobError if the forward writes to parameters or buffers, because no other process sees the change."""
        pairs = zip(self._replica.model.named_parameters(), versions, strict=False)
        for name in [name for (name, parameter), version in pairs if tensor_version(parameter) != version]:
            raise parameter_write_error(name)
        written = self._replica.buffers.changed_names()
        if written:
            raise JobError(
                f"the forward writes to the buffer {written[0]}, whose value depends on the order of the microbatches, "
                "and --update ps has no fixed order.",
                cause="a counter or a statistic that is kept from forward to forward, on one worker only",
                hint="--update sync",
            )
        self._has_checked_writes = True


class _ServerConnection:
    """The connection to one server, and this worker's copies of the weights that the server holds."""

    def __init__(self, connection: Connection, weights: Sequence[Tensor]) -> None:
        self.connection = connection
        self.weights = list(weights)
        self._layout = layout_of(weights)
        self.buffer = self._layout.empty_buffer()

    def load(self, message: ServerMessage) -> int:
        """Copy the values in the message into the weights, and return the version of these values."""
        if message.buffer is not None:
            for tensor, value in zip(self.weights, self._layout.views(message.buffer), strict=True):
                tensor.data.copy_(value)
        return int(message.fields["version"])


def _coalesce(gradient: Tensor | None) -> Tensor | None:
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def _first_reply(connection: Connection) -> ServerMessage:
    """Return the server's reply to this worker's HELLO message. A server sends it when it has its first batch."""
    while (message := connection.receive()).kind is MessageKind.WAIT:
        pass
    return message
