"""The cost of `paceline check` for an unmodified script: its step time with the recorder over that without it.

    python benchmarks/script_check.py                    # 1, 10 and 100 M parameters, 5 rounds of 10 steps
    python benchmarks/script_check.py --sizes 100M --rounds 10
    python benchmarks/script_check.py --tokens 64        # fewer tokens a step: the recorder takes a larger part of it

The script is a plain loop of a GPT-like model under AdamW on one CPU thread. Four processes run it at the same time,
and take turns: two without a recorder, one that summarizes each step, and one that summarizes each tenth step. The
ratio of the second plain process ("again") shows how much two equal processes differ. All of them keep the memory that
they free, since a process whose allocator returns it to the system pays for it again in each step. A
round is a turn of 10 steps of each of them, in an order that changes from round to round. A ratio is the median over
the rounds of a turn's time over that of the turn without a recorder in the same round; the smallest and the largest
one of the rounds follow. The first turns, with step 0, are left out.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.script_check import script_process
from paceline.script_check.recording import EVERY_VARIABLE, FOLDER_VARIABLE

SIZES = {"1M": (128, 5, 256), "10M": (384, 5, 2048), "100M": (1024, 7, 8192)}  # width, blocks, words
STEPS, CONTEXT, WARM = 10, 64, 1
VARIANTS = {"plain": 0, "again": 0, "every 1": 1, "every 10": 10}
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


class Block(nn.Module):
    """A block of a transformer without bias in its projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.joined = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mixed(self.first(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Model(nn.Module):
    """A language model whose output has its embedding's weights."""

    def __init__(self, width: int, blocks: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight[: words.size(1)]
        return F.linear(self.norm(self.blocks(x)), self.words.weight)


def run_script(size: str, tokens: int) -> None:
    """Train as a plain script does. Each line of the standard input is a turn, whose seconds are printed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(*SIZES[size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(0, SIZES[size][2], (max(1, tokens // CONTEXT), CONTEXT + 1))
    print(sum(p.numel() for p in model.parameters()), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            output = model(words[:, :-1])
            F.cross_entropy(output.flatten(0, 1), words[:, 1:].flatten()).backward()
            optimizer.step()
        print(time.perf_counter() - began, flush=True)


class Script:
    """A process of the script."""

    def __init__(self, size: str, tokens: int, *, every: int, folder: Path) -> None:
        environ = {**os.environ, **KEPT_MEMORY}
        if every:
            injected = str(Path(script_process.__file__).parent / "injected")
            environ |= {FOLDER_VARIABLE: str(folder), EVERY_VARIABLE: str(every)}
            environ["PYTHONPATH"] = os.pathsep.join([injected, *filter(None, [environ.get("PYTHONPATH", "")])])
        command = [sys.executable, __file__, "--script", size, "--tokens", str(tokens)]
        self.process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.folder = folder
        self.num_parameters = int(self.read())

    def read(self) -> str:
        """Return the next line that the script prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the script has ended with exit code {self.process.wait()}")
        return line

    def turn(self) -> float:
        """Return the seconds of a step in the next turn."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.read()) / STEPS

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def measure(size: str, tokens: int, *, rounds: int, folder: Path) -> str:
    """Return the line of the table for one size."""
    scripts: dict[str, Script] = {}
    try:
        for name, every in VARIANTS.items():
            scripts[name] = Script(size, tokens, every=every, folder=folder / f"{size}-{name}")
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for number in range(WARM + rounds):
            for name in random.Random(number).sample(list(VARIANTS), len(VARIANTS)):
                times[name].append(scripts[name].turn())
        recorded = [script.folder / "rank-0.jsonl" for name, script in scripts.items() if VARIANTS[name]]
        counts = {len(file.read_bytes().splitlines()) for file in recorded}
    finally:
        for script in scripts.values():
            script.end()
    expected = 2 + (WARM + rounds) * STEPS  # a header, step 0, and a line for each step
    assert counts == {expected}, f"{counts} lines were recorded, not {expected}"
    cells = [f"{scripts['plain'].num_parameters / 1e6:.1f} M", f"{median(times['plain'][WARM:]) * 1e3:.1f}"]
    for name in list(VARIANTS)[1:]:
        ratios = [one / plain for one, plain in zip(times[name][WARM:], times["plain"][WARM:], strict=True)]
        cells += [f"{median(ratios):.3f}", f"({min(ratios):.3f} to {max(ratios):.3f})"]
    return row(*cells)


def row(*cells: str) -> str:
    """Return a line of the table."""
    return "".join(f"{cell:>{20 if cell.startswith('(') else 12}}" for cell in cells)


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="in a step")
    parser.add_argument("--script", choices=SIZES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.script:
        run_script(arguments.script, arguments.tokens)
        return
    ratios = [cell for name in list(VARIANTS)[1:] for cell in (name, "(smallest, largest)")]
    print(row("parameters", "plain ms", *ratios))
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.sizes:
            print(measure(size, arguments.tokens, rounds=arguments.rounds, folder=Path(folder)), flush=True)


if __name__ == "__main__":
    main()
