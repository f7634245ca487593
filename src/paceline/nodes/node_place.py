"""The place of this process among the nodes: how many there are, which one this is, and where they meet."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.nodes.slurm_hosts import expand_hosts

DEFAULT_PORT = 29400
_NODES = re.compile(r"(?P<count>\d+):(?P<host>[^:]+)(:(?P<port>\d+))?")
_NUMBER_VARIABLES = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")  # of Kubeflow, and of an indexed Kubernetes Job
_FIRST_STEP_PORT, _NUM_STEP_PORTS = 20000, 9000  # below the ports that the kernel gives to others
_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """The place of one node. The nodes meet at `port` of the head, node 0."""

    num_nodes: int
    head_host: str
    port: int
    node: int | None
    """The number of this node; None if the head numbers the nodes in the order in which they arrive."""
    is_extra_task: bool = False
    """Whether another task of srun on this node stands for the node; then this one has nothing to do."""


def node_place(nodes: str | None, node: int | None, environ: Mapping[str, str]) -> NodePlace | None:
    """Return the place from the options `--nodes N:HOST[:PORT]` and `--node K`, or from a Slurm step; else None.

    Raises:
        UsageError: the options, or the variables of the step, can't be read or contradict each other.
    """
    is_extra_task = _is_step(environ) and environ.get("SLURM_LOCALID", "0") != "0"
    if nodes is None and node is not None:
        raise UsageError("--node needs --nodes.", hint=f"--nodes N:HOST --node {node}")
    if nodes is None:
        return _slurm_place(environ, is_extra_task=is_extra_task) if _is_step(environ) else None
    match = _NODES.fullmatch(nodes)
    if match is None:
        cause = "it is N:HOST or N:HOST:PORT, and an IPv6 address is no HOST"
        raise UsageError(f"--nodes {nodes} can't be read.", cause=cause, hint="--nodes 2:host1")
    num_nodes, port = int(match["count"]), int(match["port"] or DEFAULT_PORT)
    if num_nodes < 1 or not 0 < port <= _MAX_PORT:
        raise UsageError(f"--nodes {nodes}: there must be at least one node, and the port is 1 to {_MAX_PORT}.")
    number = _own_number(environ) if node is None else node
    if number is not None and not 0 <= number < num_nodes:
        raise UsageError(
            f"this node has the number {number}, but there are {num_nodes} nodes.", hint=f"--node 0 to {num_nodes - 1}"
        )
    return NodePlace(num_nodes=num_nodes, head_host=match["host"], port=port, node=number, is_extra_task=is_extra_task)


def _is_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process; a batch script has some of the same variables."""
    return "SLURM_STEP_ID" in environ and "SLURM_STEP_NODELIST" in environ


def _own_number(environ: Mapping[str, str]) -> int | None:
    """Return the number that a scheduler gave to this node; None if none did."""
    names = [*(["SLURM_NODEID"] if _is_step(environ) else []), *_NUMBER_VARIABLES]
    values = [environ.get(name, "") for name in names]
    return next((int(value) for value in values if value.isdecimal()), None)


def _slurm_place(environ: Mapping[str, str], *, is_extra_task: bool) -> NodePlace | None:
    """Return the place in a step of several nodes.

    Only the variables of the step are read: a step may have other nodes than its job (`-w`, `--relative`).

    Raises:
        UsageError: the variables can't be read.
    """
    try:
        hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
        job, step, node = (int(environ[f"SLURM_{name}"]) for name in ("JOB_ID", "STEP_ID", "NODEID"))
    except (KeyError, ValueError) as error:
        raise UsageError(f"srun set variables that can't be read: {error}.", hint="env | grep SLURM_") from None
    if len(hosts) < 2:
        return None
    port = _FIRST_STEP_PORT + (job * 7 + step * 131) % _NUM_STEP_PORTS  # another one for each step of a node
    return NodePlace(num_nodes=len(hosts), head_host=hosts[0], port=port, node=node, is_extra_task=is_extra_task)
