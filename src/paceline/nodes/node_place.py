"""The place of this process among the nodes: how many there are, which one this is, and where they meet."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

from paceline.errors import UsageError
from paceline.nodes.slurm_hosts import step_hosts, step_port

DEFAULT_PORT = 29400
PLAYED_NODES = "PACELINE_PLAYED_NODES"
"""The variable that says to the command of a node that another command plays all nodes on this machine."""
COUNTS = re.compile(r"((?P<least>\d+):)?(?P<count>\d+)")
"""The pattern of one number of nodes, or of the smallest and the largest."""
COUNTS_RULE = "there must be at least one node, and the smaller number comes first"
_NODES = re.compile(rf"{COUNTS.pattern}:(?P<host>[^:]+)(:(?P<port>\d+))?")
_FORMS = (
    "it is N or MIN:MAX (`paceline train` plays the nodes on this machine), N:HOST, N:HOST:PORT, MIN:MAX:HOST or "
    "MIN:MAX:HOST:PORT"
)
_FIRST_COUNT = re.compile(r"\d+:")
_BRACKETS = re.compile(r"\[(.*)\](:\d+)?")
_NO_HOST = re.compile(r"[^\w.%-]")
_HOST_RANGE = re.compile(r"\[(\d+)[^\]]*\]?")
_NUMBER_VARIABLES = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")  # of Kubeflow, and of an indexed Kubernetes Job
_MAX_PORT = 65535
_SAGEMAKER_FILE = Path("/opt/ml/input/config/resourceconfig.json")


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """The place of one node. The nodes meet at `port` of the head, node 0."""

    num_nodes: int
    """The number of nodes; the largest one if the run may also have fewer."""
    head_host: str
    port: int
    node: int | None
    """The number of this node; None if the head numbers the nodes in the order in which they arrive."""
    least_nodes: int = 0
    """The smallest number of nodes; 0 if only `num_nodes` is possible."""
    is_played: bool = False
    """Whether one command plays all nodes on this machine."""
    is_extra_task: bool = False
    """Whether another task of srun on this node stands for the node; then this one has nothing to do."""

    @property
    def option(self) -> str:
        """The place as a value of `--nodes`; without a host if one command plays all nodes."""
        if self.is_played:
            return self.counts
        return f"{self.counts}:{self.head}"

    @property
    def head(self) -> str:
        """The host of node 0, and the port if it is not the usual one, as a part of `--nodes`."""
        return self.head_host if self.port == DEFAULT_PORT else f"{self.head_host}:{self.port}"

    @property
    def counts(self) -> str:
        """The number of nodes as a part of `--nodes`, such as 2, or 2:4."""
        return f"{self.least_nodes}:{self.num_nodes}" if self.is_elastic else str(self.num_nodes)

    @property
    def is_elastic(self) -> bool:
        """True if the number of nodes may change while the run lasts."""
        return 0 < self.least_nodes < self.num_nodes

    @property
    def min_nodes(self) -> int:
        """The smallest number of nodes with which the run trains."""
        return self.least_nodes if self.is_elastic else self.num_nodes


def node_place(nodes: str | None, node: int | None, environ: Mapping[str, str]) -> NodePlace | None:
    """Return the place from the options `--nodes [MIN:]N:HOST[:PORT]` and `--node K`, or from a scheduler; else None.

    Slurm, Kubeflow and SageMaker say how many nodes there are, and where the first one is.

    Raises:
        UsageError: the options, or the variables of the step, can't be read or contradict each other.
    """
    is_extra_task = _is_step(environ) and environ.get("SLURM_LOCALID", "0") != "0"
    if nodes is None and node is not None:
        raise UsageError("--node needs --nodes.", hint=f"--nodes {max(2, node + 1)}:HOST --node {max(0, node)}")
    if nodes is None:
        if _is_step(environ):
            return _slurm_place(environ, is_extra_task=is_extra_task)
        return _kubeflow_place(environ) or _sagemaker_place(_SAGEMAKER_FILE)
    if COUNTS.fullmatch(nodes):
        text = f"--nodes {nodes} can't be read: a host is needed, at which the nodes meet."
        raise UsageError(text, cause=_FORMS, hint=f"--nodes {nodes}:host1")
    match = _NODES.fullmatch(nodes)
    if match is None:
        raise _unreadable(nodes)
    _check_host(nodes, match)
    num_nodes, port = int(match["count"]), int(match["port"] or DEFAULT_PORT)
    least_nodes = int(match["least"] or num_nodes)
    if not 1 <= least_nodes <= num_nodes:
        raise UsageError(f"--nodes {nodes}: {COUNTS_RULE}.", hint=f"--nodes {possible_counts(nodes)}:{match['host']}")
    if not 0 < port <= _MAX_PORT:
        raise UsageError(f"--nodes {nodes}: the port is 1 to {_MAX_PORT}.", hint=f"--nodes 2:{match['host']}")
    number = _own_number(environ) if node is None else node
    if number is not None and not 0 <= number < num_nodes:
        raise UsageError(
            f"this node has the number {number}, but there are {num_nodes} nodes.", hint=f"--node 0 to {num_nodes - 1}"
        )
    return NodePlace(
        num_nodes=num_nodes,
        head_host=match["host"],
        port=port,
        node=number,
        least_nodes=least_nodes,
        is_played=PLAYED_NODES in environ,
        is_extra_task=is_extra_task,
    )


def _check_host(nodes: str, match: re.Match[str]) -> None:
    """Check that the host in a value of `--nodes` can be the name or the address of one machine.

    Raises:
        UsageError: it is a list, a range or a user's name at a host.
    """
    host = match["host"]
    if not (found := _NO_HOST.search(host)):
        return
    first = _HOST_RANGE.sub(r"\1", re.split(r"[,;\s]", host.strip())[0].rpartition("@")[2])
    first = _NO_HOST.sub("", first).strip() or "host1"
    cause = "HOST is the first machine alone; the same line is typed on every machine"
    if found[0] == "@":
        cause = "HOST is a name or an address; Paceline does not log in to it"
    port = f":{match['port']}" if match["port"] else ""
    hint = f"--nodes {nodes[: match.end('count')]}:{first}{port}"
    raise UsageError(f"--nodes {nodes}: {host!r} is not the name of one machine.", cause=cause, hint=hint)


def possible_counts(nodes: str) -> str:
    """Return the numbers of nodes that were probably meant by impossible ones: 2 for 0, 2:4 for 4:2 or 4:2:host1."""
    match = COUNTS.match(nodes)
    numbers = [] if match is None else [int(text) for text in (match["least"], match["count"]) if text]
    if not any(numbers):
        return "2"
    return ":".join(map(str, sorted(max(1, number) for number in numbers)))


def _unreadable(nodes: str) -> UsageError:
    """Return the error for a value of `--nodes` that can't be read."""
    count = nodes.partition(":")[0]
    count = count if count.isdecimal() else "2"
    if _names_ipv6(nodes):
        return UsageError(
            f"--nodes {nodes}: the nodes meet over IPv4, and this is an IPv6 address.",
            cause="rank 0 and the link measurement listen on IPv4 addresses only",
            hint=f"--nodes {count}:HOST with a name or an IPv4 address of the first machine",
        )
    return UsageError(f"--nodes {nodes} can't be read.", cause=_FORMS, hint=f"--nodes {count}:host1")


def _names_ipv6(nodes: str) -> bool:
    """Return whether an IPv6 address, with brackets or without, follows the numbers of nodes."""
    one = _FIRST_COUNT.sub("", nodes, count=1)
    for rest in (one, _FIRST_COUNT.sub("", one, count=1)):
        in_brackets = _BRACKETS.fullmatch(rest)
        with suppress(ValueError):
            IPv6Address(in_brackets[1] if in_brackets else rest)
            return True
    return False


def split_counts(option: str) -> tuple[str, int]:
    """Return the numbers of nodes in a valid value of `--nodes`, and the largest one: `2:4` and 4 for `2:4:host1`.

    The numbers are the whole value if it has no host.
    """
    match = COUNTS.fullmatch(option) or _NODES.fullmatch(option)
    assert match is not None, option
    return option[: match.end("count")], int(match["count"])


def has_late_names(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler started this node, which may make the names of the nodes known only later."""
    names = ("KUBERNETES_SERVICE_HOST", *_NUMBER_VARIABLES)
    return any(environ.get(name) for name in names) or _is_step(environ) or _SAGEMAKER_FILE.exists()


def _is_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process; a batch script has some of the same variables."""
    return "SLURM_STEP_ID" in environ and "SLURM_STEP_NODELIST" in environ


def _own_number(environ: Mapping[str, str]) -> int | None:
    """Return the number that a scheduler gave to this node; None if none did."""
    names = [*(["SLURM_NODEID"] if _is_step(environ) else []), *_NUMBER_VARIABLES]
    values = [environ.get(name, "") for name in names]
    return next((int(value) for value in values if value.isdecimal()), None)


def _kubeflow_place(environ: Mapping[str, str]) -> NodePlace | None:
    """Return the place of a pod of Kubeflow's trainer, which sets the variables of torchrun's options."""
    try:
        num_nodes, node = int(environ["PET_NNODES"]), int(environ["PET_NODE_RANK"])
        host, port = environ["PET_MASTER_ADDR"], int(environ.get("PET_MASTER_PORT", DEFAULT_PORT))
    except (KeyError, ValueError):  # not set, or a range of numbers, such as 2:4
        return None
    if num_nodes < 2 or not 0 <= node < num_nodes:
        return None
    return NodePlace(num_nodes=num_nodes, head_host=host, port=port, node=node)


def _sagemaker_place(file: Path) -> NodePlace | None:
    """Return the place of a machine of a SageMaker training job, from the file that describes the job's machines."""
    try:
        config = json.loads(file.read_text())
        hosts = sorted(config["hosts"])
        node = hosts.index(config["current_host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if len(hosts) < 2:
        return None
    return NodePlace(num_nodes=len(hosts), head_host=hosts[0], port=DEFAULT_PORT, node=node)


def _slurm_place(environ: Mapping[str, str], *, is_extra_task: bool) -> NodePlace:
    """Return the place in a step.

    Only the variables of the step are read: a step may have other nodes than its job (`-w`, `--relative`).

    Raises:
        UsageError: the variables can't be read.
    """
    try:
        hosts, port, node = step_hosts(environ), step_port(environ), int(environ["SLURM_NODEID"])
    except (KeyError, ValueError) as error:
        raise UsageError(f"srun set variables that can't be read: {error}.", hint="env | grep SLURM_") from None
    return NodePlace(num_nodes=len(hosts), head_host=hosts[0], port=port, node=node, is_extra_task=is_extra_task)
