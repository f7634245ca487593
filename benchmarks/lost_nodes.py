"""Kill nodes of a running training, and cut their networks, and see it continue and end with the same weights.

    python benchmarks/lost_nodes.py                              # three kills and three cuts, in three layouts
    python benchmarks/lost_nodes.py --layouts ddp --kills 1 --cuts 0

Needs root: each of three nodes is a network namespace of this machine, with its own command `paceline train --nodes
3:node0 --nodes.restarts 20`. A kill ends all processes of a node with SIGKILL at a random moment, and the command of
the node is typed again. A cut makes the network of a node silent for longer than `nodes.patience` (5 s here), and then
mends it; the node comes back by itself. Node 0 is killed and cut, too. The table has the seconds from each fault to the
next new step, the digest beside that of a run of as many ranks on one machine, and what was left running on the nodes.

    python benchmarks/lost_nodes.py --saves memory               # restarts from the memory of the other nodes

Without this option, a run saves on disk every 5 steps. With it, every 100 steps on disk and every 2 steps in memory,
with a copy on another node; then only nodes 1 and 2 are killed and cut.

    python benchmarks/lost_nodes.py --resizes 3                  # nodes come and go, three times from 2 to 3 to 2

Here node 2 starts while the others train, and is asked to stop later. The table has the seconds from the command, or
from the signal, to the next new step on the other number of nodes, and the steps that were trained more than once.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.agent.shared_status import read_heartbeat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.nodes.network_nodes import NetworkNodes, network_nodes

LAYOUTS = {"ddp": 1, "fsdp": 1, "pp=2,dp=3": 2, "pp=2,dp_shard=-1": 2}  # and the ranks of each node
DISTURBED, RESIZED = ["ddp", "fsdp", "pp=2,dp=3"], ["ddp", "fsdp", "pp=2,dp_shard=-1"]
NUM_NODES, STEPS, PORT = 3, 400, 29811
PATIENCE = 5.0
WAIT_SECONDS = 120.0
SETTINGS = [
    "--train.exact", "true", "--nodes.restarts", "20", "--nodes.patience", str(PATIENCE),
    "--train.steps", str(STEPS), "--watch.to", "jsonl", "--log.every", "1", "--nodes.last_call", "2",
]  # fmt: skip
SAVES = {
    "disk": ["--checkpoint.every", "5"],
    "memory": ["--checkpoint.every", "100", "--checkpoint.memory_every", "2"],
}
JOB = """
import time
import torch
from torch import nn
import paceline as pl

def make_job() -> pl.Job:
    x = torch.randn(960, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    def loss(output, batch):
        time.sleep(0.03)
        return (output - batch[1]).square().sum(), len(output)
    model = lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    def optimizer(named):
        return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)
    sizes = {"global_batch_size": 24, "micro_batch_size": 4}
    return pl.Job(model=model, loss=loss, train_data=data, optimizer=optimizer, **sizes)
"""


@dataclass
class Disturbed:
    """A run of three nodes, and the commands that run on them."""

    nodes: NetworkNodes
    run: Path
    words: list[str]
    counts: str = str(NUM_NODES)
    commands: "dict[int, subprocess.Popen[str]]" = field(default_factory=dict)

    def start(self, node: int) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "paceline", "train", "job.py", "--run-dir", str(self.run)]
        command += ["--nodes", f"{self.counts}:node0:{PORT}", "--node", str(node), *self.words, *SETTINGS]
        log = (self.run.parent / f"{self.run.name}-node-{node}.log").open("a")
        environ = {"CUDA_VISIBLE_DEVICES": ""}
        self.commands[node] = self.nodes.start(node, command, environ=environ, output=log.fileno())
        log.close()

    def num_attempts(self) -> int:
        return len(list((self.run / "logs").glob("attempt-*")))

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]

    def last_step(self) -> int:
        """Return the last step that rank 0 has finished in the newest attempt; 0 before the first."""
        folder = self.run / "logs" / f"attempt-{self.num_attempts()}"
        beat = read_heartbeat(folder / "pulse-0") if folder.is_dir() else None
        return beat.step if beat is not None and beat.is_sent else 0

    def wait_for_step(self, step: int) -> None:
        """Wait for a step. Raises: RuntimeError: it does not come."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.last_step() < step:
            if time.monotonic() > deadline or self.commands[0].poll() is not None:
                raise RuntimeError(f"no step {step}; the logs are in {self.run.parent}")
            time.sleep(0.02)

    def kill(self, node: int) -> None:
        self.nodes.kill(node)
        self.commands[node].wait()
        self.start(node)

    def cut(self, node: int) -> None:
        self.nodes.cut(node)
        time.sleep(PATIENCE + 2)
        self.nodes.mend(node)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", nargs="+", default=None)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--cuts", type=int, default=3)
    parser.add_argument("--resizes", type=int, default=0, help="how many times a node comes and goes")
    parser.add_argument("--saves", choices=SAVES, default="disk")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{'layout':<12} {'fault':<12} {'seconds':>8}", flush=True)
    is_good = True
    for layout in options.layouts or (RESIZED if options.resizes else DISTURBED):
        folder = Path(tempfile.mkdtemp(prefix="lost-nodes-"))
        (folder / "job.py").write_text(JOB)
        with network_nodes(NUM_NODES, folder) as nodes:
            is_good &= resize(nodes, layout, options.resizes) if options.resizes else disturb(nodes, layout, options)
    return 0 if is_good else 1


def disturb(nodes: NetworkNodes, layout: str, options: argparse.Namespace) -> bool:
    """Run one layout with all faults; return whether it ended as the run without faults."""
    chance = random.Random(f"{options.seed} {layout}")
    words = ["--layout", layout, "--ranks-per-node", str(LAYOUTS[layout]), *SAVES[options.saves]]
    run = Disturbed(nodes, nodes.folder / "run", words)
    for node in range(NUM_NODES):
        run.start(node)
    run.wait_for_step(10)
    faults = ["kill"] * options.kills + ["cut"] * options.cuts
    chance.shuffle(faults)
    least = 1 if options.saves == "memory" else 0
    targets = [least + number % (NUM_NODES - least) for number in range(len(faults))]
    chance.shuffle(targets)
    for fault, node in zip(faults, targets, strict=True):
        time.sleep(chance.uniform(0.2, 1.0))
        before, start_time = run.last_step(), time.monotonic()
        run.kill(node) if fault == "kill" else run.cut(node)
        run.wait_for_step(before + 2)  # one step may have ended before the fault
        print(f"{layout:<12} {fault + f' node {node}':<12} {time.monotonic() - start_time:>8.1f}", flush=True)
    codes = [command.wait(timeout=WAIT_SECONDS) for command in run.commands.values()]
    restarts = [event for event in run.events() if event["event"] == "Restarted"]
    repeated = ", ".join(f"{event['repeated_steps']} ({event['source']})" for event in restarts)
    print(f"{layout:<12} steps repeated at each restart: {repeated}", flush=True)
    return not any(codes) and is_as_alone(nodes, layout, ranks=NUM_NODES * LAYOUTS[layout], codes=codes)


def resize(nodes: NetworkNodes, layout: str, times: int) -> bool:
    """Train on two nodes, then on three, and so on; return whether the run ended as one on two nodes."""
    words = ["--layout", layout, "--ranks-per-node", str(LAYOUTS[layout]), *SAVES["disk"]]
    run = Disturbed(nodes, nodes.folder / "run", words, "2:3")
    for node in range(2):
        run.start(node)
    run.wait_for_step(10)
    for _ in range(times):
        for change in ("2 to 3 nodes", "3 to 2 nodes"):
            time.sleep(0.5)
            attempt, start_time = run.num_attempts(), time.monotonic()
            if change.startswith("2"):
                run.start(2)
            else:
                run.commands[2].send_signal(signal.SIGTERM)
            while run.num_attempts() == attempt:
                time.sleep(0.02)
            run.wait_for_step(run.last_step() + 1)
            run.wait_for_step(run.last_step() + 1)
            print(f"{layout:<12} {change:<12} {time.monotonic() - start_time:>8.1f}", flush=True)
        run.commands[2].wait(timeout=WAIT_SECONDS)
    codes = [command.wait(timeout=WAIT_SECONDS) for command in run.commands.values()]
    steps = [event["step"] for event in run.events() if event["event"] == "StepDone"]
    is_once = steps == list(range(1, STEPS + 1))
    print(f"{layout:<12} {len(steps) - len(set(steps))} steps trained again, {len(set(steps))} of {STEPS} trained")
    return is_as_alone(nodes, layout, ranks=2 * LAYOUTS[layout], codes=codes) and is_once and codes == [0, 0, 75]


def is_as_alone(nodes: NetworkNodes, layout: str, *, ranks: int, codes: list[int]) -> bool:
    """Return whether the run has the weights of one on one machine, and left nothing running."""
    left = sum(len(nodes.pids(node)) for node in range(NUM_NODES))
    alone = [*sys.executable.split(), "-W", "ignore", "-m", "paceline", "train", "job.py", "--run-dir", "alone"]
    alone += ["--layout", layout, "--ranks", str(ranks), *SETTINGS]
    subprocess.run(alone, cwd=nodes.folder, check=True, capture_output=True)
    digests = [json.loads((nodes.folder / name / "weights.json").read_text())["digest"] for name in ("run", "alone")]
    is_equal = digests[0] == digests[1]
    verdict = "the same digest" if is_equal else f"ANOTHER DIGEST: {digests}"
    print(f"{layout:<12} exit codes {codes}, {verdict}, {left} processes left; {nodes.folder}", flush=True)
    return is_equal and not left


if __name__ == "__main__":
    sys.exit(main())
