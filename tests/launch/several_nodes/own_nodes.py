"""Nodes of a training on this machine: one command for each, as on several machines."""

import json
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import Shop


@dataclass
class NodeEnd:
    """How the command of a node ended."""

    code: int
    out: str
    err: str

    @property
    def screen(self) -> str:
        return self.out + self.err


@dataclass
class OwnNodes:
    """The nodes of one run, whose numbers are given."""

    shop: Shop
    count: int
    words: tuple[str, ...]
    least: int | None = None
    port: int = 0
    processes: "dict[int, subprocess.Popen[str]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])

    @property
    def option(self) -> str:
        least = "" if self.least is None else f"{self.least}:"
        return f"{least}{self.count}:127.0.0.1:{self.port}"

    def start(self, node: int, *words: str, job: str = "job.py", environ: dict[str, str] | None = None) -> None:
        """Start the command of a node."""
        self.processes[node] = self.shop.start(
            "train", job, "--nodes", self.option, "--node", str(node), *self.words, *words, environ=environ
        )

    def start_all(self, *words: str, environ: dict[str, str] | None = None) -> None:
        for node in range(self.count):
            self.start(node, *words, environ=environ)

    def end(self, node: int, *, timeout: float = 120) -> NodeEnd:
        process = self.processes[node]
        out, err = process.communicate(timeout=timeout)
        return NodeEnd(process.returncode, out, err)

    def ends(self) -> list[NodeEnd]:
        return [self.end(node) for node in range(self.count)]


def pulse_step(run: Path, rank: int, *, attempt: int = 1) -> int:
    """The last step that a rank has finished; 0 before."""
    from paceline.launch.agent.shared_status import read_heartbeat

    beat = read_heartbeat(run / "logs" / f"attempt-{attempt}" / f"pulse-{rank}")
    return 0 if beat is None else beat.step


def wait_for_step(run: Path, step: int, *, rank: int = 0, attempt: int = 1, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while pulse_step(run, rank, attempt=attempt) < step:
        assert time.monotonic() < deadline, f"no step {step} of rank {rank} in attempt {attempt}"
        time.sleep(0.02)


def rank_pid(run: Path, rank: int, *, attempt: int = 1) -> int:
    from paceline.launch.agent.rank_activity import read_rank_activity

    activity = read_rank_activity(run / "logs" / f"attempt-{attempt}", rank)
    assert activity is not None
    return activity.pid


def written(run: Path, name: str) -> dict[str, object]:
    """The content of a JSON file of a run."""
    content: dict[str, object] = json.loads((run / name).read_text())
    return content
