"""The part of a training that Ray Train runs: the trainer in the driver, and the function of each of its workers.

Before Ray ends its workers, for a resize or because a machine is drained, they ask their nodes to save and stop. So the
training goes on at the very step at which it was.
"""

import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.train
import ray.train.collective
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import ExitCode, MachineError
from paceline.launch.agent.signals import active_stop_signals, is_main_thread
from paceline.launch.ray.node_process import NodeProcess, StopReason, refusal_to_end
from paceline.launch.ray.ray_run import RayRun

_POLL_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_NO_NODE_SECONDS = 60.0  # a node asks every second, also while it saves
_SAVE_SECONDS = 600.0  # for the nodes to save before Ray ends their workers
_SECONDS_PER_HOUR = 3600.0
_nodes: list[NodeProcess] = []
"""The node of this Ray worker, which is a process of its own. Empty before its start, and in the driver."""


class NodeEnded(Exception):
    """A node has ended before the training was over. Ray then starts all nodes again."""


class StopSwitch:
    """The stop request of the driver. It is an actor, which all workers ask every second."""

    def __init__(self) -> None:
        self._is_on = False
        self._asked_time = time.monotonic()

    def turn_on(self) -> None:
        """Ask all nodes to save and stop."""
        self._is_on = True

    def is_on(self) -> bool:
        """Return whether the nodes are asked to stop."""
        self._asked_time = time.monotonic()
        return self._is_on

    def silent_seconds(self) -> float:
        """Return for how long no worker has asked."""
        return time.monotonic() - self._asked_time


class SavingBackend(Backend):  # type: ignore[misc]
    """A backend of Ray Train that starts nothing. Ray asks it before it ends the workers, and waits for its answer."""

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Wait until all nodes that are still there have saved and stopped."""
        calls = worker_group.execute_async(stop_node, StopReason.SHUTDOWN)
        ray.wait(calls, num_returns=len(calls), timeout=_SAVE_SECONDS)  # a call to a lost worker fails at once


class SavingBackendConfig(BackendConfig):  # type: ignore[misc]
    """The configuration of `SavingBackend`. Ray's own backends make a process group, which here the ranks make."""

    @property
    def backend_cls(self) -> type:
        """The class of the backend."""
        return SavingBackend


def stop_node(reason: StopReason) -> None:
    """Ask the node of this Ray worker to save and stop, and wait until it has ended."""
    for node in _nodes:
        if node.ask_to_stop(reason):
            print_line(f"{reason}: saving first")
        node.wait(_SAVE_SECONDS)


def train_node(config: Mapping[str, Any]) -> int:
    """Train on one node, which this Ray worker starts. Return the exit code if the training is over.

    Raises:
        NodeEnded: Ray should start all nodes again.
    """
    run, switch, context = RayRun(**config["run"]), config["switch"], ray.train.get_context()
    rank, num_nodes = context.get_world_rank(), context.get_world_size()
    head = ray.train.collective.broadcast_from_rank_zero(_free_address() if rank == 0 else None)
    place = ["--nodes", f"{num_nodes}:{head}", "--node", str(rank)]
    node = NodeProcess([*shlex.split(run.command)[1:], *place], folder=run.folder)
    _nodes[:] = [node]
    threading.Thread(target=_watch_drains, args=(node,), name="paceline-drain-watch", daemon=True).start()
    while (code := node.wait(_POLL_SECONDS)) is None:
        with suppress(ray.exceptions.RayError):  # the driver is gone, and Ray soon ends this worker
            if ray.get(switch.is_on.remote()) and not node.stop_reason:
                node.ask_to_stop(StopReason.REQUEST)
    problem = refusal_to_end(code, node.stop_reason)
    if problem:
        raise NodeEnded(f"node {rank} of {num_nodes} ended: {problem}")
    return code if code >= 0 else int(ExitCode.STOPPED)


def _watch_drains(node: NodeProcess) -> None:
    """Ask the node to save and stop when Ray says that it will take away a machine of this training.

    Ray's call waits for all workers. Therefore it runs in a thread that ends with the process.
    """
    with suppress(Exception):  # without the watch, the loss of the machine costs the steps since the last save
        while node.wait(0) is None:
            if ray.train.get_preemption_info() is not None:
                stop_node(StopReason.DRAIN)
            time.sleep(_POLL_SECONDS)


def _free_address() -> str:
    """Return an address of this machine that the other nodes reach, with a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def fit(run: RayRun) -> int:
    """Train with Ray Train, and return the exit code of the training.

    Raises:
        MachineError: there is no Ray cluster.
    """
    _connect()
    switch = ray.remote(num_cpus=0)(StopSwitch).remote()
    trainer = DataParallelTrainer(
        train_node,
        train_loop_config={"run": asdict(run), "switch": switch},
        backend_config=SavingBackendConfig(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=run.nodes if run.is_elastic else run.nodes[0],
            resources_per_worker=dict(run.resources),
            use_gpu=bool(run.resources.get("GPU")),
            elastic_resize_monitor_interval_s=run.resize_seconds,
        ),
        run_config=ray.train.RunConfig(
            name=run.name,
            storage_path=str((Path(run.run) / "submit" / "ray").resolve()),
            failure_config=ray.train.FailureConfig(max_failures=run.max_failures),
        ),
    )
    code = _wait_for_end(trainer, switch, seconds=run.hours * _SECONDS_PER_HOUR)
    print_line(f"exit code {code}; run: {run.run}")
    return code


def _connect() -> None:
    """Connect to the cluster of this job. An address that nobody answers is tried first: Ray would wait for minutes.

    Raises:
        MachineError: there is none.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = address.rpartition(":")
    try:
        if "://" not in address and port.isdecimal():
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(address=address)
    except (OSError, RuntimeError) as error:
        raise MachineError(
            f"there is no Ray cluster here: {next(iter(str(error).splitlines()), '')}.",
            hint="ray job submit hands the file in to a cluster; ray start --head starts one on this machine",
        ) from None


def _wait_for_end(trainer: Any, switch: Any, *, seconds: float) -> int:
    """Run the trainer to its end, and return the exit code.

    After a stop signal, or after `seconds`, the nodes are asked to save and stop. Where no node runs, because the
    cluster has no room for one, there is nothing to wait for.
    """
    ends: list[int] = []
    thread = threading.Thread(target=lambda: ends.append(_exit_code(trainer)), name="paceline-ray", daemon=True)
    with _stop_signals() as signals:  # in this thread, where Ray would install a handler of its own
        thread.start()
        deadline, is_stopping = time.monotonic() + seconds, False
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if not is_stopping and (signals or time.monotonic() > deadline):
                is_stopping = True
                print_line("stopping: all nodes save first", sys.stderr)
                switch.turn_on.remote()
            if is_stopping and _silent_seconds(switch) > _NO_NODE_SECONDS:
                print_line("no node runs, so nothing is left to save", sys.stderr)
                return int(ExitCode.STOPPED)
    return ends[0] if ends else int(ExitCode.FAILED)


def _silent_seconds(switch: Any) -> float:
    """Return for how long no node has asked whether it should stop; 0 if that is not known."""
    with suppress(ray.exceptions.RayError):
        return float(ray.get(switch.silent_seconds.remote(), timeout=_CONNECT_SECONDS))
    return 0.0


def _exit_code(trainer: Any) -> int:
    """Run the trainer, and return the exit code of the training, which node 0 returns."""
    try:
        return int(trainer.fit().return_value)
    except ray.train.TrainingFailedError as error:
        failures = getattr(error, "worker_failures", {})
        lost = f"{plural(len(failures), 'worker')} failed" if failures else "Ray has ended the training"
        print_line(f"FAILED: {lost}, and Ray does not start them again: {error}", sys.stderr)
        return int(ExitCode.STOPPED if failures else ExitCode.FAILED)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Return a context in which the stop signals of this process are collected in a list."""
    received: list[int] = []

    def collect(number: int, _: object) -> None:
        received.append(number)

    numbers = active_stop_signals() if is_main_thread() else []
    previous = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
