"""Kill ranks of running trainings at random moments, and see each run restart by itself and end with the same weights.

    python benchmarks/kills.py                                   # 1,000 kills over nine layouts and update rules
    python benchmarks/kills.py --kills 60 --layouts ddp fsdp     # fewer
    python benchmarks/kills.py --kinds server --kills 40         # only kills of the fork server
    python benchmarks/kills.py --exact --layouts ddp zero2 pp    # in exact mode
    python benchmarks/kills.py --background --layouts ddp fsdp   # saves in the background, and in memory at each step
    python benchmarks/kills.py --launcher torchrun --kills 60    # torchrun --max-restarts 5 starts the ranks again
    python benchmarks/kills.py --launcher backend --kills 60     # the same with --rdzv-backend=paceline

Each run saves at every step. SIGKILL is sent from outside to a random rank ("one"), to two ranks at once ("two"), to a
rank and, up to 0.3 s later, to a rank of the attempt that follows ("recovery"), to the process that starts the ranks
("starter"), to the fork server ("server"), or to the command itself, which this script then starts again, as a service
manager would ("command"). With torchrun, a run has at most five kills, its agent is left alone, and no run has
parameter servers, which torchrun can't start again alone. The moments are random, so that they fall into each phase of
a step and of a save as often as the phase is long.

A kill counts as recovered if the run made a new step afterwards. The time is that from the (last) kill to the first
step beyond those that were logged before it, so it includes the repeated steps. At the end the digest of the weights
is compared with the one of a run that was not disturbed. Also counted is what is left behind: processes, files in
/dev/shm, and folders of sockets.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn

import paceline as pl

LAYOUTS = {
    "ddp": (2, ("--layout", "ddp")),
    "zero2": (2, ("--layout", "zero2")),
    "fsdp": (2, ("--layout", "fsdp")),
    "pp": (2, ("--layout", "pp=2")),
    "tp": (2, ("--layout", "tp=2")),
    "pp+dp_shard": (4, ("--layout", "pp=2,dp_shard=2")),
    "pipedream": (2, ("--update", "pipedream")),
    "local": (2, ("--update", "local,every=4")),
    "ps": (3, ("--update", "ps,staleness=0")),
}
ROUND_KILLS = {"paceline": 25, "torchrun": 5, "backend": 5}  # kills of one run
KIND_WEIGHTS = {
    "paceline": {"one": 780, "recovery": 120, "two": 70, "starter": 20, "server": 5, "command": 5},
    "torchrun": {"one": 90, "two": 10},
    "backend": {"one": 85, "two": 10, "server": 5},
}
STEPS_OF_A_KILL = 16  # about so many steps between two kills
WAIT_SECONDS = 60.0


class Net(nn.Module):
    """Six blocks whose forward takes a few milliseconds longer than it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(float(os.environ.get("PAUSE", "0")))
        for block in self.blocks:
            x = block(x)
        return x


def make_job() -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 32, generator=generator)
    y = x @ torch.randn(32, 32, generator=generator) / 6
    return pl.Job(
        model=Net,
        loss=lambda output, batch: ((output - batch[1]).square().sum(), output.numel()),
        train_data=torch.utils.data.TensorDataset(x, y),
        eval_data=torch.utils.data.TensorDataset(x[:64], y[:64]),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        global_batch_size=16,
    )


@dataclass
class Tally:
    """What was measured: kills by kind, and seconds from a kill to the next new step."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def all_seconds(self) -> list[float]:
        return sorted(seconds for kind in self.seconds.values() for seconds in kind)

    @property
    def num_kills(self) -> int:
        return len(self.all_seconds) + len(self.lost)


class Events:
    """The events file of a running training, read as it grows."""

    def __init__(self, run: Path) -> None:
        self._path = run / "events.jsonl"
        self._offset = 0
        self.steps: list[tuple[float, int]] = []  # time and number of each logged step

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                event: dict[str, Any] = json.loads(line)
            except ValueError:  # a kill cut it off
                continue
            if event.get("event") == "StepDone":
                self.steps.append((event["time"], event["step"]))

    @property
    def last_step(self) -> int:
        self.read()
        return max((step for _, step in self.steps), default=0)


def children(parent: int) -> list[int]:
    """The living children of a process."""
    try:
        pids = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []
    return [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    """False for a process that has ended and was not yet reaped: a kill of it would count as recovered."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True)
class Processes:
    """The processes of a running command. With torchrun, its agent is both the server and the starter."""

    server: int = 0
    starter: int = 0
    ranks: tuple[int, ...] = ()


def processes_of(command: int) -> Processes:
    """The fork server, the starter, and the ranks that write a log."""
    if b"torch.distributed.run" in Path(f"/proc/{command}/cmdline").read_bytes():
        for server in children(command):
            if b"script_server" in _command_of(server):
                return Processes(server, server, tuple(children(server)))
        return Processes(command, command, tuple(children(command)))
    for server in [*children(command), *_adopted_servers(command)]:
        for starter in children(server):
            ranks = tuple(pid for pid in children(starter) if _log_of(pid).startswith("rank-"))
            if ranks:
                return Processes(server, starter, ranks)
    return Processes()


def _adopted_servers(command: int) -> list[int]:
    """The fork servers of a command that are not its children, because they replaced one that was killed."""
    end = f"\0{command}\0".encode()
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if b"agent.forkserver" in (line := _command_of(pid)) and line.endswith(end)]


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _log_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/fd/1").resolve().name
    except OSError:
        return ""


def words(name: str, folder: Path, *, steps: int, options: argparse.Namespace) -> list[str]:
    ranks, layout = LAYOUTS[name]
    rendezvous = "--rdzv-backend=paceline" if options.launcher == "backend" else "--standalone"
    torchrun = ["-m", "torch.distributed.run", rendezvous, "--nproc-per-node", str(ranks), "--max-restarts", "5"]
    is_torchrun = options.launcher != "paceline"
    background = ("--checkpoint.every", "2", "--checkpoint.memory_every", "1", "--checkpoint.background")
    saves = background if options.background else ("--checkpoint.every", "1")
    return [
        sys.executable, "-W", "ignore", *(torchrun if is_torchrun else ()), "-m", "paceline", "train",
        str(Path(__file__).resolve()), *layout, *(() if is_torchrun else ("--ranks", str(ranks))),
        "--run-dir", str(folder), "--train.steps", str(steps), "--train.micro_batch_size", "4",
        "--train.threads", "1", *saves, "--eval.every", "40", "--log.every", "1",
        "--watch.to", "jsonl", "--survive.restarts", "8", *(("--train.exact",) if options.exact else ()),
    ]  # fmt: skip


def kill_once(kind: str, command: int, chance: random.Random) -> float | None:
    """Kill as `kind` says; return the time of the last kill, or None if there was nobody to kill."""
    found = processes_of(command)
    if not found.ranks:
        return None
    single = {"command": command, "server": found.server, "starter": found.starter}
    count = min(len(found.ranks), 2 if kind == "two" else 1)
    victims = [single[kind]] if kind in single else chance.sample(found.ranks, k=count)
    killed = time.time()
    for pid in victims:
        _kill(pid)
    if kind == "recovery":
        time.sleep(chance.uniform(0.0, 0.3))
        ranks = processes_of(command).ranks
        if ranks:
            killed = time.time()
            _kill(chance.choice(ranks))
    return killed


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def disturb(
    name: str, folder: Path, *, kills: int, options: argparse.Namespace, chance: random.Random, tally: Tally
) -> str:
    """One run with kills; return its digest, or why there is none."""
    mark = f"KILLS{uuid.uuid4().hex}"
    steps = STEPS_OF_A_KILL * kills
    log = (folder.parent / f"{folder.name}.log").open("w")
    command, environ = words(name, folder, steps=steps, options=options), {**os.environ, "MARK": mark}
    process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    events, count = Events(folder), 0
    while process.poll() is None and count < kills:
        time.sleep(chance.uniform(0.02, 0.4))
        before = events.last_step
        if not before or before > steps - 3:
            continue
        weights = {kind: w for kind, w in KIND_WEIGHTS[options.launcher].items() if kind in (options.kinds or [kind])}
        kind = chance.choices(list(weights), weights=list(weights.values()))[0]
        killed = kill_once(kind, process.pid, chance)
        if killed is None:
            continue
        count += 1
        if kind == "command":
            process.wait()
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        seconds = wait_for_step(events, process, after=before, since=killed)
        if seconds is None and process.poll() == 0:
            continue  # the run was at its end, and is compared below; this kill counts for nothing
        if seconds is None:
            tally.lost.append(f"{name} {folder.name}: {kind} after step {before}")
        else:
            tally.seconds.setdefault(kind, []).append(seconds)
    try:
        process.wait(timeout=WAIT_SECONDS + steps)
    except subprocess.TimeoutExpired:
        process.kill()
    log.close()
    left = [entry.name for entry in Path("/proc").glob("[0-9]*") if _has_mark(entry, mark)]
    if left or process.returncode:
        return f"exit code {process.returncode}, {len(left)} processes left"
    return digest(folder)


def wait_for_step(events: Events, process: "subprocess.Popen[bytes]", *, after: int, since: float) -> float | None:
    """Seconds from a kill to the first new step; None if the run ended or makes none."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        is_over = process.poll() is not None
        events.read()
        for told, step in events.steps:
            if told > since and step > after:
                return told - since
        if is_over:
            return None
        time.sleep(0.01)
    return None


def _has_mark(entry: Path, mark: str) -> bool:
    try:
        return mark.encode() in (entry / "environ").read_bytes() and "State:\tZ" not in (entry / "status").read_text()
    except OSError:
        return False


def digest(folder: Path) -> str:
    return str(json.loads((folder / "weights.json").read_text())["digest"])


def left_behind() -> set[str]:
    """What a run could leave behind outside of its folder."""
    temporary = Path(tempfile.gettempdir())
    return {
        str(path) for path in (*Path("/dev/shm").glob("*"), *temporary.glob("pymp-*"), *temporary.glob("paceline-*"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--layouts", nargs="+", default=[], choices=list(LAYOUTS))
    parser.add_argument("--kinds", nargs="+", default=[], choices=list(KIND_WEIGHTS["paceline"]))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--launcher", choices=tuple(ROUND_KILLS), default="paceline")
    options = parser.parse_args()
    options.layouts = options.layouts or [n for n in LAYOUTS if n != "ps" or options.launcher == "paceline"]
    chance, before = random.Random(options.seed), left_behind()
    share = -(-options.kills // len(options.layouts))
    totals, different = Tally(), 0
    folder = tempfile.mkdtemp(prefix="kills-")
    print(f"the runs are in {folder} while they last")
    print(f"{'layout':<12} {'kills':>6} {'recovered':>9} {'p50':>7} {'p99':>7} {'worst':>7}  weights")
    for name in options.layouts:
        tally, results = Tally(), []
        while tally.num_kills < share:
            kills = min(ROUND_KILLS[options.launcher], share - tally.num_kills)
            number = len(results)
            whole = Path(folder) / f"{name}-whole-{kills}"
            if not whole.exists():
                command = words(name, whole, steps=STEPS_OF_A_KILL * kills, options=options)
                subprocess.run(command, check=True, capture_output=True)
            cut = Path(folder) / f"{name}-{number}"
            found = disturb(name, cut, kills=kills, options=options, chance=chance, tally=tally)
            results.append((found, digest(whole)))
        wrong = [found for found, expected in results if found != expected]
        different += len(wrong)
        seconds = tally.all_seconds
        print(
            f"{name:<12} {tally.num_kills:>6} {len(seconds):>9} {_row(seconds)}  "
            + (f"{len(wrong)} of {len(results)} runs differ: {wrong[0]}" if wrong else f"{len(results)} runs bitwise"),
            flush=True,
        )
        for kind, values in tally.seconds.items():
            totals.seconds.setdefault(kind, []).extend(values)
        totals.lost += tally.lost
    for kind, values in sorted(totals.seconds.items()):
        print(f"  {kind:<10} {len(values):>6} {'':>9} {_row(sorted(values))}")
    print(f"{'all':<12} {totals.num_kills:>6} {len(totals.all_seconds):>9} {_row(totals.all_seconds)}")
    print(f"left behind: {sorted(left_behind() - before) or 'nothing'}")
    for line in totals.lost:
        print(f"not recovered: {line}")
    if totals.lost or different:
        sys.exit(f"the runs and what they printed are kept in {folder}")
    shutil.rmtree(folder)


def _row(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return " ".join(f"{value:6.2f}s" for value in (seconds * 3)[:3] or [float("nan")] * 3)
    cuts = quantiles(seconds, n=100, method="inclusive")
    return f"{cuts[49]:6.2f}s {cuts[98]:6.2f}s {seconds[-1]:6.2f}s"


if __name__ == "__main__":
    main()
