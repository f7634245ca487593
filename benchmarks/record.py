"""What `pl.record` costs a step: the same loop with and without it, step by step in turn, in one process."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl

STEPS, WARM = 20, 3
SIZES = {"0.07 M": (128, 2, 32), "1.1 M": (512, 4, 64), "4.2 M": (1024, 4, 64)}


def loop(width: int, layers: int, batch: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A multilayer perceptron under AdamW, and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(batch, width), torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        loss: Tensor = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

    return model, optimizer, step


def seconds(step: Callable[[], None]) -> float:
    """One step's time."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    """Print a line for each size."""
    torch.set_num_threads(1)
    titles = ("parameters", "plain ms", "recorded ms", "more ms", "(10 % to 90 %)", "bytes per step")
    print("".join(f"{title:>16}" for title in titles))
    for name, (width, layers, batch) in SIZES.items():
        _, _, plain = loop(width, layers, batch)
        model, optimizer, recorded = loop(width, layers, batch)
        with tempfile.TemporaryDirectory() as folder, pl.record(model, optimizer, folder):
            pairs = [(seconds(plain), seconds(recorded)) for _ in range(STEPS + WARM)][WARM:]
            size = (Path(folder) / "rank-0.jsonl").stat().st_size / (STEPS + WARM + 1)
        more = [(b - a) * 1e3 for a, b in pairs]
        cut = quantiles(more, n=10)
        a, b = (median(column) * 1e3 for column in zip(*pairs, strict=True))
        spread = f"({cut[0]:.1f} to {cut[-1]:.1f})"
        row = (name, f"{a:.2f}", f"{b:.2f}", f"{median(more):.2f}", spread, f"{size:,.0f}")
        print("".join(f"{cell:>16}" for cell in row))


if __name__ == "__main__":
    main()
