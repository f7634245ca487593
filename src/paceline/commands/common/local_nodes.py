"""Several nodes on this machine, for learning and for tests: `--nodes 3` starts the command once for each of them."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO

from paceline.commands.command_table import TrainOptions
from paceline.commands.common.node_networks import NodeNetworks, open_node_networks
from paceline.config.secret_settings import mask_value
from paceline.console.output import print_line
from paceline.errors import UsageError
from paceline.launch.agent.forkserver_client import module_path_options
from paceline.launch.agent.signals import STOP_SIGNALS, active_stop_signals, die_with_parent, is_main_thread
from paceline.launch.run_outcome import describe_resume_point
from paceline.nodes.finding import format_nodes
from paceline.nodes.node_place import COUNTS, COUNTS_RULE, DEFAULT_PORT, PLAYED_NODES, NodePlace, possible_counts
from paceline.reporting.run_history import read_history
from paceline.run_folder.run_folder import RunFolder

_LOOPBACK = "127.0.0.1"
_MAX_NODES = 64
_POLL_SECONDS = 0.5
_END_SECONDS = 3.0  # for the ranks of a node whose command was killed
_RELAY_SECONDS = 5.0  # for the last lines of a node whose command has ended


def played_place(options: TrainOptions) -> NodePlace | None:
    """Return the place of node 0 if this machine is to play all nodes; None if `--nodes` names a host, or is not given.

    Raises:
        UsageError: the number is not possible, or another option contradicts it.
    """
    match = None if options.nodes is None else COUNTS.fullmatch(options.nodes)
    if match is None:
        return None
    num_nodes = int(match["count"])
    least_nodes = int(match["least"] or num_nodes)
    if not 1 <= least_nodes <= num_nodes:
        raise UsageError(f"--nodes {options.nodes}: {COUNTS_RULE}.", hint=f"--nodes {possible_counts(match[0])}")
    if num_nodes == 1:
        hint = "--nodes 2 plays two; without --nodes, this machine trains alone"
        raise UsageError(f"--nodes {options.nodes} plays nodes on this machine, at least two.", hint=hint)
    if num_nodes > _MAX_NODES:
        text = f"--nodes {options.nodes} plays nodes on this machine, at most {_MAX_NODES}."
        raise UsageError(text, hint=f"--nodes {_MAX_NODES}; --nodes {options.nodes}:HOST needs a machine for each")
    if options.node is not None:
        count = max(num_nodes, options.node + 1)
        raise UsageError("--node needs the host of node 0.", hint=f"--nodes {count}:HOST --node {options.node}")
    return NodePlace(
        num_nodes=num_nodes, least_nodes=least_nodes, head_host=_LOOPBACK, port=DEFAULT_PORT, node=0, is_played=True
    )


def run_local_nodes(
    num_nodes: int, options: TrainOptions, settings: Sequence[str], *, resume_command: str, can_return: bool
) -> int:
    """Start the command of each node, with its output on this screen; return the exit code of the head.

    Each node has a network of its own if this process may make them; else all use the loopback interface. A stop signal
    to this process goes to all nodes. If the head is killed, it can't print `resume_command`, so this process does.
    With `can_return`, the others wait for a lost node, and the screen shows the line that starts it again.
    """
    if options.dry_run:
        return _run_on_networks(num_nodes, options, settings, networks=None, can_return=False)
    with open_node_networks(num_nodes) as networks:
        if isinstance(networks, NodeNetworks):
            lines = list(networks.usage_lines())
        else:
            lines = [f"{num_nodes} nodes as processes on {_LOOPBACK}: {networks}"]
        for line in lines:
            print_line(line, sys.stderr)
        own_networks = networks if isinstance(networks, NodeNetworks) else None
        code = _run_on_networks(num_nodes, options, settings, networks=own_networks, can_return=can_return)
        if own_networks is not None and can_return:
            _wait_for_others(own_networks)
    if code < 0 and options.run_dir is not None:
        code = _recorded_exit_code(RunFolder(Path(options.run_dir)), otherwise=code)
    if -code in set(signal.Signals) - set(STOP_SIGNALS):
        print_line(f"node 0 was ended by {signal.Signals(-code).name}. Resume: {resume_command}", sys.stderr)
        if options.run_dir is not None:
            print_line(describe_resume_point(RunFolder(Path(options.run_dir))), sys.stderr)
    return code if code >= 0 else 128 - code  # as a shell says that a signal has ended it


def _wait_for_others(networks: NodeNetworks) -> None:
    """Wait as long as nodes train in these networks that a user has started again by hand."""
    deadline, is_said = time.monotonic() + _END_SECONDS, False
    while nodes := networks.nodes_in_use():
        if time.monotonic() > deadline and not is_said:
            is_said = True
            text = f"{format_nodes(nodes)} still run here, started again by hand; their networks stay until they end"
            print_line(f"{text} (Ctrl-C removes them)", sys.stderr)
        time.sleep(_POLL_SECONDS)


def _recorded_exit_code(run: RunFolder, *, otherwise: int) -> int:
    """Return the exit code with which the newest attempt of a run has ended, although its first head was killed."""
    history = read_history(run)
    return int(history.last_event("RunEnded")["exit_code"]) if history.has_ended else otherwise


def _run_on_networks(
    num_nodes: int,
    options: TrainOptions,
    settings: Sequence[str],
    *,
    networks: NodeNetworks | None,
    can_return: bool,
) -> int:
    """Start the command of each node, on its network if there are networks; return the exit code of the head.

    The lines of all nodes but the head begin with the number of the node, and standard output is the head's alone. The
    code is negative if a signal has ended the head.
    """
    head = f"{_LOOPBACK}:{_free_port()}" if networks is None else networks.head
    place = ["--nodes", f"{options.nodes}:{head}"]
    words = [*_as_words(options), *settings, *place]
    command = [sys.executable, *module_path_options(), "-m", "paceline", "train", *words]
    if can_return:
        last = num_nodes - 1
        typed = ["paceline", "train", *_as_words(options), *_without_secrets(settings), *place, "--node", str(last)]
        line = shlex.join(typed if networks is None else networks.enter(last, typed))
        print_line(f"  start a killed node again: {PLAYED_NODES}={num_nodes} {line}", sys.stderr)
    processes: list[subprocess.Popen[bytes]] = []
    environ = {**os.environ, PLAYED_NODES: str(num_nodes)}
    end_with_this = partial(die_with_parent, os.getpid())
    with _forwarded_signals(processes):
        try:
            for node in range(num_nodes):
                own = [*command, "--node", str(node)]
                process = subprocess.Popen(
                    own if networks is None else networks.inside(node, own),
                    stdout=subprocess.PIPE if node else None,
                    stderr=subprocess.STDOUT if node else None,
                    env=environ,
                    start_new_session=True,
                    preexec_fn=end_with_this,
                )
                processes.append(process)
            relays = [
                Thread(target=_relay, args=(process.stdout, node), name="paceline-relay", daemon=True)
                for node, process in enumerate(processes)
                if node
            ]
            for relay in relays:  # after the last fork
                relay.start()
            codes = [process.wait() for process in processes]
            for relay in relays:
                relay.join(_RELAY_SECONDS)
            return codes[0]
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()


def _relay(output: IO[bytes], node: int) -> None:
    """Print the lines of a node, with its number, until its command has ended."""
    with output:
        for line in output:
            text = f"[node {node}] {line.decode(errors='replace').rstrip()}".rstrip()
            print_line(f"{text}\n", sys.stderr, end="")  # at once, so that lines of two nodes do not mix


def _as_words(options: TrainOptions) -> list[str]:
    """Return the options as the words of a command, without `--nodes`."""
    words = [options.job]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in ("job", "nodes", "node") or value == field.default:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value)]
    return words


def _without_secrets(settings: Sequence[str]) -> list[str]:
    """Return the settings of a command line with dots in place of secret values."""
    words, name = list[str](), ""
    for word in settings:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            words.append(mask_value(name, word))
        else:
            words.append(f"--{key}={mask_value(key, value)}" if equals else word)
        name = key if word.startswith("--") and not equals else ""
    return words


def _free_port() -> int:
    with socket.create_server((_LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def _forwarded_signals(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Return a context in which the stop signals of this process go to all nodes.

    The nodes have sessions of their own, so that a signal to this process's group does not reach them twice.
    """

    def forward(number: int, _: object) -> None:
        for process in processes:
            process.send_signal(number)

    numbers = active_stop_signals() if is_main_thread() else []
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
