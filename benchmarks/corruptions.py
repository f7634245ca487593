"""Flip random bits in the weights of one rank, and see each flip found at the next check, its rank named, and repaired.

    python benchmarks/corruptions.py                  # 40 flips
    python benchmarks/corruptions.py --flips 8        # fewer

A run of 30 steps compares its replicas every five steps and saves every five steps. After a random step, one random bit
of one random weight flips on one random rank, as a memory error would do. (The highest bits of the exponent are left
out: a weight of 1e38 ends in the finite check.) Found means that the run restarted at the next multiple of five. Named
means that the error, or after the restart a line, has the right rank. Repaired means that the final weights are bitwise
those of a run without the flip.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline as pl

LAYOUTS = {
    "ddp, 2 ranks": (2, ("--layout", "ddp")),
    "ddp, 3 ranks": (3, ("--layout", "ddp")),
    "hsdp, 4 ranks": (4, ("--layout", "dp_replicate=2,dp_shard=2")),
    "pp with 2 replicas, 4 ranks": (4, ("--layout", "pp=2,dp_replicate=2")),
}
STEPS, EVERY, WIDTH = 30, 5, 32
BITS = (*range(10, 27), 31)  # the lowest bits may vanish in the next update


class FlippingAdamW(torch.optim.AdamW):
    """AdamW, and after one step of one rank a flipped bit in a weight that this rank holds."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps += 1
        fault: dict[str, Any] = json.loads(os.environ.get("FLIP", "{}"))
        is_probe = self.param_groups[0]["params"][0].shape[-1] != WIDTH  # Paceline tries the optimizer on other tensors
        is_due = not is_probe and bool(fault) and self.steps == fault["step"]
        if is_due and int(os.environ.get("RANK", "0")) == fault["rank"]:
            self.flip_bit(random.Random(fault["seed"]), done=Path(fault["done"]))
        return loss

    def flip_bit(self, rng: random.Random, *, done: Path) -> None:
        """Flip a random bit, unless an earlier attempt of the run has done so."""
        if done.exists():
            return
        held = [local(p) for group in self.param_groups for p in group["params"] if local(p).numel()]
        flat = rng.choice(held).view(-1)
        index, bit = rng.randrange(flat.numel()), rng.choice(BITS)
        mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        flat[index : index + 1].view(torch.int32).bitwise_xor_(mask)
        done.write_text(f"bit {bit} of element {index}")


def local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of the parameter that this rank holds."""
    tensor = parameter.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def make_job() -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, WIDTH, generator=generator)
    return pl.Job(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))),
        loss=lambda output, batch: ((output - batch[1]).square().sum(), output.numel()),
        train_data=torch.utils.data.TensorDataset(x, x.roll(1, 1)),
        optimizer=lambda named: FlippingAdamW([p for _, p in named], lr=1e-3),
        global_batch_size=12,
    )


def train(run: Path, ranks: int, words: tuple[str, ...], flip: dict[str, Any] | None = None) -> str:
    """Train into `run`, and return the digest of the final weights; empty if the run failed."""
    command = [
        sys.executable, "-W", "ignore", "-m", "paceline", "train", str(Path(__file__).resolve()), "--ranks", str(ranks),
        "--run-dir", str(run), "--train.steps", str(STEPS), "--train.check_every", str(EVERY), "--checkpoint.every",
        str(EVERY), "--checkpoint.memory_every", "0", "--train.micro_batch_size", "3", "--watch.to", "jsonl", *words,
    ]  # fmt: skip
    environ = {**os.environ, "FLIP": json.dumps(flip or {})}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], flush=True)
        return ""
    return str(json.loads((run / "weights.json").read_text())["digest"])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one flip."""

    is_found: bool
    is_named: bool
    is_repaired: bool


def flip_once(number: int, rng: random.Random, digests: dict[str, str]) -> Outcome:
    """Train once with a flip in one of the layouts."""
    name = list(LAYOUTS)[number % len(LAYOUTS)]
    ranks, words = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        if name not in digests:
            digests[name] = train(Path(folder) / "whole", ranks, words)
        step, rank = rng.randrange(2, STEPS - EVERY), rng.randrange(ranks)
        flip = {"step": step, "rank": rank, "seed": rng.random(), "done": str(Path(folder) / "flipped")}
        run = Path(folder) / "run"
        digest = train(run, ranks, words, flip)
        lines = (run / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        restarts = [event for event in events if event["event"] == "Restarted"]
        is_found = len(restarts) == 1 and restarts[0]["failed_step"] == -(-step // EVERY) * EVERY
        notes = [event["text"] for event in events if event["event"] == "Note"]
        is_named = any(f"rank {rank} had a wrong copy" in text for text in notes) or (
            "the copy on most ranks" in str(restarts) and f"differs on rank {rank} " in str(restarts)
        )
        outcome = Outcome(is_found=is_found, is_named=is_named, is_repaired=digest == digests[name] != "")
        if not (outcome.is_found and outcome.is_named and outcome.is_repaired):
            print(f"{name}, rank {rank}, step {step}: {outcome}, {restarts}, {notes}", flush=True)
        return outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, digests = random.Random(arguments.seed), dict[str, str]()
    outcomes = [flip_once(number, rng, digests) for number in range(arguments.flips)]
    print(f"{arguments.flips} flipped bits in {', '.join(LAYOUTS)}:")
    for name in ("found", "named", "repaired"):
        print(f"  {sum(getattr(outcome, f'is_{name}') for outcome in outcomes)} {name}", flush=True)


if __name__ == "__main__":
    main()
