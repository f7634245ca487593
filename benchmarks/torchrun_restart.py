"""How long torchrun takes from a kill to the next new step of a script that does not use Paceline.

    python benchmarks/torchrun_restart.py               # 10 rounds with 3 kills each
    python benchmarks/torchrun_restart.py --rounds 2    # fewer

The script trains a small model with torch's own DDP and AdamW, saves its own checkpoint at each step, and loads it when
it starts. In each round it runs once with `--rdzv-backend=c10d` and once with `--rdzv-backend=paceline`, and the order
alternates. SIGKILL is sent to a random rank at a random moment. For c10d, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set,
because without it a restart may hang (pytorch#135712). The final weights of all runs are compared.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)))
optimizer = torch.optim.AdamW(model.parameters())
start, checkpoint = 0, folder / "checkpoint.pt"
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
for step in range(start, steps):
    generator = torch.Generator().manual_seed(2 * step + rank)
    model(torch.randn(16, 32, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, folder / "new.pt")
        os.replace(folder / "new.pt", checkpoint)
        with (folder / "steps").open("a") as file:
            print(time.time(), step + 1, os.environ["TORCHELASTIC_RESTART_COUNT"], file=file)
    dist.barrier()
if rank == 0:
    (folder / "weights.json").write_text(json.dumps([p.tolist() for p in model.parameters()]))
dist.destroy_process_group()
"""
BACKENDS = {
    "c10d": ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
    "paceline": ("--rdzv-backend=paceline",),
}
STEPS_OF_A_KILL = 60
WAIT_SECONDS = 60.0


def last_steps(folder: Path) -> list[tuple[float, int, int]]:
    """The time and the number of each step that was made, and the number of the restart."""
    try:
        lines = (folder / "steps").read_text().splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines if line.count(" ") == 2]
    return [(float(moment), int(step), int(restart)) for moment, step, restart in words]


def time_kill(folder: Path, chance: random.Random) -> float | None:
    """Kill a rank, and return the seconds to the first new step; None if there is none."""
    while not (steps := last_steps(folder)):
        time.sleep(0.05)
    time.sleep(chance.uniform(0.1, 0.5))
    steps = last_steps(folder)
    killed = time.time()
    os.kill(int((folder / f"pid-{chance.randrange(2)}").read_text()), signal.SIGKILL)
    while time.time() - killed < WAIT_SECONDS:
        # a step of the same attempt may have been complete but for its line
        later = [
            moment for moment, step, restart in last_steps(folder) if restart > steps[-1][2] and step > steps[-1][1]
        ]
        if later:
            return later[0] - killed
        time.sleep(0.005)
    return None


def run(backend: str, folder: Path, *, kills: int, chance: random.Random) -> tuple[list[float | None], str]:
    """Run the script with kills; return the seconds of each kill, and the final weights as text."""
    folder.mkdir()
    (folder / "own.py").write_text(SCRIPT)
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *BACKENDS[backend], "--nproc-per-node", "2",
        "--max-restarts", str(kills), str(folder / "own.py"), str(folder), str(STEPS_OF_A_KILL * (kills + 1)),
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        seconds = []
        for _ in range(kills):
            seconds.append(time_kill(folder, chance))
            if seconds[-1] is None:
                process.kill()
                break
        process.wait()
    try:
        return seconds, (folder / "weights.json").read_text()
    except OSError:
        return seconds, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if "paceline" not in entry_points(group="torchrun.handlers").names:
        sys.exit("torchrun does not find the backend paceline: pip install -e . installs its entry point")
    chance = random.Random(options.seed)
    found: dict[str, list[float | None]] = {name: [] for name in BACKENDS}
    weights = set()
    with tempfile.TemporaryDirectory(prefix="restarts-") as folder:
        for number in range(options.rounds):
            for name in sorted(BACKENDS, reverse=bool(number % 2)):
                seconds, text = run(name, Path(folder) / f"{name}-{number}", kills=options.kills, chance=chance)
                found[name] += seconds
                weights.add(text)
    medians = {}
    print(f"{'backend':<10} {'kills':>5} {'recovered':>9} {'median':>8} {'worst':>8}")
    for name, values in found.items():
        recovered = [value for value in values if value is not None]
        medians[name] = median(recovered)
        print(
            f"{name:<10} {len(values):>5} {len(recovered):>9} {medians[name]:7.3f}s {max(recovered):7.3f}s", flush=True
        )
    print(f"c10d takes {medians['c10d'] / medians['paceline']:.1f} times as long as paceline")
    print(f"weights: {'bitwise equal in all runs' if len(weights) == 1 and '' not in weights else 'different'}")
    sys.exit(int(len(weights) != 1 or any(value is None for values in found.values() for value in values)))


if __name__ == "__main__":
    main()
