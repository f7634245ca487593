"""Nodes on one machine: each has its own network, host name, /etc/hosts and /dev/shm. Needs root and `ip netns`."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "10.83.0"
ENVIRON = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}  # where `ip` and `tc` are
_START = """
hostname "$NODE_HOST"
mount --bind "$NODE_HOSTS" /etc/hosts
mount -t tmpfs -o size="$NODE_SHM",mode=1777 shm /dev/shm
eval "$NODE_SETUP"
unset NODE_HOST NODE_HOSTS NODE_SHM NODE_SETUP
exec "$@"
"""


def can_make_nodes() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or not all(shutil.which(name, path=ENVIRON["PATH"]) for name in ("ip", "tc", "unshare")):
        return False
    probe = f"paceline-probe-{os.getpid()}"
    is_made = (
        subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False, env=ENVIRON).returncode == 0
    )
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False, env=ENVIRON)
    return is_made


@dataclass
class NetworkNodes:
    """Nodes 0, 1, ... with the host names node0, node1, ... on one bridge."""

    count: int
    folder: Path
    prefix: str
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def address(self, node: int) -> str:
        return f"{NETWORK}.{node + 1}"

    def space(self, node: int) -> str:
        return f"{self.prefix}-{node}"

    @property
    def bridge(self) -> str:
        return f"{self.prefix}-bridge"

    def mac(self, node: int) -> str:
        shown = subprocess.run(
            ["ip", "-n", self.space(node), "-json", "link", "show", "eth0"],
            check=True,
            capture_output=True,
            text=True,
            env=ENVIRON,
        )
        return str(json.loads(shown.stdout)[0]["address"])

    def up(self) -> None:
        bridge = self.bridge
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "name", "bridge0", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge0", "up")
        for node in range(self.count):
            space, port = self.space(node), f"port{node}"
            ip("netns", "add", space)
            ip("-n", bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", bridge, "link", "set", port, "master", "bridge0", "up")
            ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        self.hosts = self.folder / "hosts"
        known = [f"{self.address(node)} node{node}" for node in range(self.count)]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *known, ""]))

    def down(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        for space in [*(self.space(node) for node in range(self.count)), self.bridge]:
            pids = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, check=False, env=ENVIRON
            ).stdout
            subprocess.run(["kill", "-9", *pids.split()], capture_output=True, check=False, env=ENVIRON)
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False, env=ENVIRON)

    def start(
        self,
        node: int,
        command: Sequence[str],
        *,
        environ: dict[str, str] | None = None,
        hosts: str = "",
        shared_memory: str = "1g",
        setup: str = "",
        output: int = subprocess.PIPE,
    ) -> "subprocess.Popen[str]":
        """Start a command on a node. `hosts` replaces its /etc/hosts, and `setup` is a line of shell before it."""
        file = self.hosts
        if hosts:
            file = self.folder / f"hosts-{node}"
            file.write_text(hosts)
        variables = {
            "NODE_HOST": f"node{node}", "NODE_HOSTS": str(file), "NODE_SHM": shared_memory, "NODE_SETUP": setup,
        }  # fmt: skip
        inside = ["ip", "netns", "exec", self.space(node), "unshare", "--uts", "--mount", "--propagation", "private"]
        process = subprocess.Popen(
            [*inside, "sh", "-c", _START, "sh", *command],
            env={**ENVIRON, **variables, **(environ or {})},
            cwd=self.folder,
            stdout=output,
            stderr=output,
            text=True,
        )
        self.started.append(process)
        return process

    def run_inside(self, node: int, *command: str) -> None:
        """Run a command in a node's network."""
        subprocess.run(
            ["ip", "netns", "exec", self.space(node), *command], check=True, capture_output=True, env=ENVIRON
        )

    def slow(self, node: int, rate: str) -> None:
        """Limit a node's link in both directions."""
        shape = ["root", "tbf", "rate", rate, "burst", "32768", "latency", "50ms"]
        self.run_inside(node, "tc", "qdisc", "replace", "dev", "eth0", *shape)
        inside = ["ip", "netns", "exec", self.bridge]
        subprocess.run([*inside, "tc", "qdisc", "replace", "dev", f"port{node}", *shape], check=True, env=ENVIRON)

    def cut(self, node: int) -> None:
        """Make a node's network silent: what it sends and what is sent to it vanishes."""
        ip("-n", self.bridge, "link", "set", f"port{node}", "nomaster")

    def mend(self, node: int) -> None:
        """End the silence of `cut`."""
        ip("-n", self.bridge, "link", "set", f"port{node}", "master", "bridge0")

    def pids(self, node: int) -> list[int]:
        """The processes that run on a node."""
        shown = subprocess.run(
            ["ip", "netns", "pids", self.space(node)], capture_output=True, text=True, check=True, env=ENVIRON
        )
        return [int(pid) for pid in shown.stdout.split()]

    def kill(self, node: int) -> None:
        """Kill all processes of a node at once, as a crash of the machine would."""
        for pid in self.pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def fast(self, node: int) -> None:
        """End the limit of `slow`."""
        self.run_inside(node, "tc", "qdisc", "del", "dev", "eth0", "root")
        inside = ["ip", "netns", "exec", self.bridge]
        subprocess.run([*inside, "tc", "qdisc", "del", "dev", f"port{node}", "root"], check=True, env=ENVIRON)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, env=ENVIRON)


@contextmanager
def network_nodes(count: int, folder: Path) -> Iterator[NetworkNodes]:
    """Make nodes, and remove them at the end, with all of their processes."""
    nodes = NetworkNodes(count=count, folder=folder, prefix=f"pl{os.getpid()}")
    try:
        nodes.up()
        yield nodes
    finally:
        nodes.down()
