"""A network of its own for each node that this machine plays: namespaces on one bridge, for root on Linux.

The user can cut a node off (`ip -n NAME link set eth0 down`), as a broken cable would. The names begin with the
process that made them, so that a later start can remove what a killed one left.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOPBACK_VARIABLE = "PACELINE_LOOPBACK"
"""The variable with which a user asks for nodes without networks of their own."""
_PREFIX = "paceline"
_NAME = re.compile(rf"{_PREFIX}-(?P<pid>\d+)-(node\d+|bridge)")
_NETWORK = "10.83.0"
_TOOLS = ("ip", "unshare", "mount", "hostname")
_ENTER = """
hostname "$0" && hosts=$(mktemp) && printf '%s' "$1" > "$hosts" && mount --bind "$hosts" /etc/hosts || exit
rm "$hosts"; unset hosts; shift; exec "$@"
"""
_COMMAND_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class NodeNetworks:
    """The networks of the nodes."""

    num_nodes: int

    @property
    def head(self) -> str:
        """The address of node 0."""
        return _address(0)

    def enter(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a node as a user types it, with the host name of this machine."""
        return ["ip", "netns", "exec", _namespace(node), *command]

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a node, with the node's host name."""
        enter = self.enter(node, ["unshare", "--uts", "sh", "-c", _ENTER])
        known = [f"{_address(other)} node{other}" for other in range(self.num_nodes)]
        return [*enter, f"node{node}", "\n".join(["127.0.0.1 localhost", *known, ""]), *command]

    def nodes_in_use(self) -> list[int]:
        """Return the nodes in whose networks a process runs."""
        return [node for node in range(self.num_nodes) if _processes_inside(_namespace(node))]

    def usage_lines(self) -> Iterator[str]:
        """Yield lines for the screen: how to disturb a node."""
        last = _namespace(self.num_nodes - 1)
        yield f"{self.num_nodes} nodes, each with a network of its own, on which it reaches only the others"
        yield f"  if the job needs the internet: {LOOPBACK_VARIABLE}=1 before the command"
        yield f"  cut a node off: ip -n {last} link set eth0 down (or up)"
        yield f"  kill a node: kill -9 $(ip netns pids {last})"
        yield f"  slow a node down: tc -n {last} qdisc add dev eth0 root tbf rate 20mbit burst 32k latency 50ms"


@contextmanager
def open_node_networks(num_nodes: int) -> Iterator[NodeNetworks | str]:
    """Return a context with the networks of the nodes, which it removes at the end; or why there are none."""
    reason = _reason_against()
    if not reason:
        _remove_stale()
    networks = NodeNetworks(num_nodes=num_nodes)
    try:
        reason = reason or _make(networks)
        yield reason or networks
    finally:
        _remove([_bridge(), *(_namespace(node) for node in range(num_nodes))])


def _namespace(node: int) -> str:
    return f"{_PREFIX}-{os.getpid()}-node{node}"


def _bridge() -> str:
    return f"{_PREFIX}-{os.getpid()}-bridge"


def _address(node: int) -> str:
    return f"{_NETWORK}.{node + 1}"


def _reason_against() -> str:
    """Return why this process makes no networks; empty if it can try."""
    if os.environ.get(LOOPBACK_VARIABLE):
        return f"{LOOPBACK_VARIABLE} is set"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} is not installed" if missing else ""


def _make(networks: NodeNetworks) -> str:
    """Make the namespaces and the bridge, and try one; return the first problem, empty if there is none."""
    bridge = _bridge()
    commands = [
        ["netns", "add", bridge],
        ["-n", bridge, "link", "add", "name", "bridge0", "type", "bridge"],
        ["-n", bridge, "link", "set", "bridge0", "up"],
    ]
    for node in range(networks.num_nodes):
        name, port = _namespace(node), f"port{node}"
        commands += [
            ["netns", "add", name],
            ["-n", bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name],
            ["-n", bridge, "link", "set", port, "master", "bridge0", "up"],
            ["-n", name, "addr", "add", f"{_address(node)}/24", "dev", "eth0"],
            ["-n", name, "link", "set", "eth0", "up"],
            ["-n", name, "link", "set", "lo", "up"],
        ]
    for command in commands:
        if problem := _run_ip(*command):
            return problem
    try:
        tried = subprocess.run(
            networks.inside(0, ["true"]), capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


def _run_ip(*words: str) -> str:
    """Run `ip`, and return what it said if it failed."""
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() or f"ip {' '.join(words)} failed" if done.returncode else ""


def _processes_inside(namespace: str) -> str:
    """Return the ids of the processes of a namespace, or nothing if they can't be listed."""
    command = ["ip", "netns", "pids", namespace]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _remove(names: Sequence[str]) -> None:
    existing = _existing_namespaces()
    for name in names:
        if name in existing:
            _run_ip("netns", "delete", name)


def _remove_stale() -> None:
    """Remove the namespaces of processes that have ended without a clean-up, such as by SIGKILL."""
    names = [(name, _NAME.fullmatch(name)) for name in _existing_namespaces()]
    _remove([name for name, match in names if match and not Path("/proc", match["pid"]).exists()])


def _existing_namespaces() -> set[str]:
    try:
        return {path.name for path in Path("/run/netns").iterdir()}
    except OSError:
        return set()
