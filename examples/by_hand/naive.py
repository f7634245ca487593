"""Naive model parallelism by hand: the model is cut in two, and the halves take turns.

    python examples/by_hand/naive.py [DEVICE DEVICE]      for instance: cuda:0 cuda:1

A model that does not fit on one device is cut: the first half on one device, the second half on another. Activations
move forward across the cut, and their gradients move back. The result is the same training. The price is time: the
second half needs the output of the first, so one device always waits for the other. `pipeline.py` shortens the wait.

Messages: one activation and its gradient a step. Memory: half of the model on each device. Waiting: each half for the
other.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from harness import compare, flatten
from torch import nn

DEVICES = sys.argv[1:3] if len(sys.argv) > 2 else ["cpu", "cpu"]
STEPS, BATCH, WIDTH = 6, 256, 256


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*blocks)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x.roll(1, dims=1).sin()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


SPANS: list[tuple[int, str, float, float]] = []  # half, forward or backward, start, end


@contextmanager
def clock(half: int, kind: str) -> Iterator[None]:
    """Record when a half computes."""
    start = time.perf_counter()
    yield
    if DEVICES[half].startswith("cuda"):  # a GPU still computes after the call has returned
        torch.cuda.synchronize(DEVICES[half])
    SPANS.append((half, kind, start, time.perf_counter()))


def train_in_halves() -> tuple[torch.Tensor, nn.Sequential]:
    model = make_model()
    middle = len(model) // 2
    first, second = model[:middle].to(DEVICES[0]), model[middle:].to(DEVICES[1])
    optimizer = make_optimizer(model)
    losses = []
    for step in range(STEPS):
        x, y = make_batch(step)
        x, y = x.to(DEVICES[0]), y.to(DEVICES[1])
        optimizer.zero_grad()
        with clock(0, "F"):
            sent = first(x)
        # One `backward` could cross the cut by itself. Here the graph is cut too, so that each half can be timed.
        received = sent.detach().to(DEVICES[1]).requires_grad_()
        with clock(1, "F"):
            loss = nn.functional.mse_loss(second(received), y)
        with clock(1, "B"):
            loss.backward()
        gradient = received.grad.to(DEVICES[0])  # back across the cut
        with clock(0, "B"):
            sent.backward(gradient)
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses), model


def train_alone() -> tuple[torch.Tensor, nn.Sequential]:
    model = make_model().to(DEVICES[0])
    optimizer = make_optimizer(model)
    losses = []
    for step in range(STEPS):
        x, y = (tensor.to(DEVICES[0]) for tensor in make_batch(step))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses), model


def draw() -> None:
    """Print when each half computed in the last step, and its busy share of the time of all steps."""
    steps = [SPANS[at : at + 4] for at in range(0, len(SPANS), 4)]
    begin, length = steps[-1][0][2], steps[-1][-1][3] - steps[-1][0][2]
    total = sum(step[-1][3] - step[0][2] for step in steps)
    print("the last step, from left to right: F forward, B backward, . waits for the other half")
    for half in (0, 1):
        line = ["."] * 60
        for _, kind, start, end in (span for span in steps[-1] if span[0] == half):
            for cell in range(int((start - begin) / length * 60), int((end - begin) / length * 60)):
                line[cell] = kind
        busy = sum(end - start for which, _, start, end in SPANS if which == half)
        print(f"half {half} on {DEVICES[half]:7} {''.join(line)}  busy {busy / total:.0%}")


if __name__ == "__main__":
    losses, model = train_in_halves()
    draw()
    losses_alone, alone = train_alone()
    gradients, gradients_alone = ([p.grad for p in m.parameters()] for m in (model, alone))
    sys.exit(
        compare(
            {
                "losses": (losses_alone, losses),
                "weights": (flatten(alone.parameters()), flatten(model.parameters())),
                "last gradients": (flatten(gradients_alone), flatten(gradients)),
            }
        )
    )
