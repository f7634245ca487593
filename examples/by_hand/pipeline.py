"""Pipeline parallelism by hand: GPipe, then 1F1B, with the bubble of each.

    python examples/by_hand/pipeline.py

The model is cut into stages, one on each rank, as in `naive.py`. The batch is cut into m microbatches: while stage 1
computes the first, stage 0 computes the second. With p equal stages, a step takes m + p - 1 turns. Each stage waits in
p - 1 of them, while the pipeline fills and drains. So the *bubble* is (p - 1) / (m + p - 1) of the time. The program
runs two orders of the same work:
- GPipe: all forwards, then all backwards. A stage keeps the activations of all m microbatches.
- 1F1B: a stage runs its first backward as soon as it can, and then alternates forward and backward. Stage s keeps the
  activations of at most p - s microbatches. The bubble is the same: 1F1B saves memory, not time.

Messages: an activation and its gradient, for each microbatch and each cut. Memory: one stage, and the activations
above. Waiting: for the previous stage in forward, for the next stage in backward.

A laptop has fewer cores than this pipeline has stages, so real stages would wait for cores. Each stage here really
computes its small layer and then sleeps for the rest of a fixed time, as if a device computed. The measured bubble is a
little larger than the closed form, since messages take time too; on a busy machine it is larger still.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import compare, flatten, run_ranks
from torch import Tensor, nn

STAGES, MICROBATCHES, STEPS, ROWS, WIDTH = 4, 8, 3, 4, 16
FORWARD, BACKWARD = 0.01, 0.02  # seconds
Action = tuple[str, int]  # "F" or "B", and the microbatch


def order_gpipe(stage: int, stages: int, micro: int) -> list[Action]:
    return [("F", number) for number in range(micro)] + [("B", number) for number in range(micro)]


def order_1f1b(stage: int, stages: int, micro: int) -> list[Action]:
    warm = min(stages - stage - 1, micro)  # forwards before the last stage starts its first backward
    actions = [("F", number) for number in range(warm)]
    for number in range(micro - warm):
        actions += [("F", warm + number), ("B", number)]
    return actions + [("B", number) for number in range(micro - warm, micro)]


def make_stage(stage: int) -> nn.Module:
    torch.manual_seed(stage)  # a stage's weights depend only on the stage, so that one process draws the same weights
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(MICROBATCHES, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=2).sin()


def make_loss(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().sum() / (MICROBATCHES * ROWS * WIDTH)  # a sum, divided by the global count


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


class Stage:
    """One rank's stage: it receives, computes and sends, and records when it computed."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.is_first, self.is_last = stage, stage == 0, stage == stages - 1
        self.model = make_stage(stage)
        self.live: dict[int, tuple[Tensor, Tensor]] = {}  # microbatch -> input and output, kept for backward
        self.most_live = 0
        self.sent: list[tuple[dist.Work, Tensor]] = []
        self.spans: list[tuple[float, float]] = []
        self.loss = torch.zeros(())

    def forward(self, number: int, x: Tensor, y: Tensor) -> None:
        inputs = x[number] if self.is_first else receive(self.stage - 1)
        inputs.requires_grad_(not self.is_first)
        start = time.monotonic()
        output = self.model(inputs)
        if self.is_last:
            output = make_loss(output, y[number])
            self.loss += output.detach()
        self.note(start, FORWARD)
        self.live[number] = inputs, output
        self.most_live = max(self.most_live, len(self.live))
        if not self.is_last:
            self.send(output.detach(), self.stage + 1)

    def backward(self, number: int) -> None:
        inputs, output = self.live.pop(number)
        gradient = None if self.is_last else receive(self.stage + 1)
        start = time.monotonic()
        output.backward(gradient)  # adds to the weights' gradients, as accumulation does
        self.note(start, BACKWARD)
        if not self.is_first:
            self.send(inputs.grad, self.stage - 1)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send without waiting. If two neighbours both waited until the other receives, they would wait forever."""
        self.sent.append((dist.isend(tensor, to), tensor))  # the tensor must outlive the message

    def note(self, start: float, seconds: float) -> None:
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        self.spans.append((start, time.monotonic()))  # one clock for all processes of a machine


def receive(source: int) -> Tensor:
    tensor = torch.empty(ROWS, WIDTH)
    dist.recv(tensor, source)
    return tensor


def train(order: Callable[[int, int, int], list[Action]], rank: int, ranks: int) -> dict[str, object]:
    stage = Stage(rank, ranks)
    optimizer = make_optimizer(stage.model)
    losses, bubbles, actions = [], [], order(rank, ranks, MICROBATCHES)
    for step in range(STEPS):
        x, y = make_batch(step)
        optimizer.zero_grad()
        stage.spans, stage.loss = [], torch.zeros(())
        dist.barrier()
        for kind, number in actions:
            if kind == "F":
                stage.forward(number, x, y)
            else:
                stage.backward(number)
        for work, _ in stage.sent:
            work.wait()
        stage.sent.clear()
        optimizer.step()
        losses.append(stage.loss)
        bubbles.append(measure_bubble(stage.spans, ranks))
    return {
        "losses": torch.stack(losses), "weights": flatten(stage.model.parameters()), "live": stage.most_live,
        "bubble": statistics.median(bubbles), "order": " ".join(f"{kind}{number}" for kind, number in actions),
    }  # fmt: skip


def measure_bubble(spans: list[tuple[float, float]], ranks: int) -> float:
    """Return the fraction of the ranks' time without computation, between the first and the last computation."""
    mine = torch.tensor([spans[0][0], spans[-1][1], sum(end - start for start, end in spans)], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(every, mine)
    begin, end, busy = torch.stack(every).unbind(1)
    return 1 - (busy.sum() / (ranks * (end.max() - begin.min()))).item()


def train_both(rank: int, ranks: int) -> list[dict[str, object]]:
    return [train(order, rank, ranks) for order in (order_gpipe, order_1f1b)]


def train_alone() -> tuple[Tensor, nn.Module]:
    model = nn.Sequential(*(make_stage(stage) for stage in range(STAGES)))
    optimizer = make_optimizer(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [make_loss(model(x), y) for x, y in zip(*make_batch(step), strict=True)]
        for loss in parts:
            loss.backward()
        optimizer.step()
        losses.append(torch.stack(parts).detach().sum())
    return torch.stack(losses), model


if __name__ == "__main__":
    found = run_ranks(train_both, STAGES)
    losses, alone = train_alone()
    closed = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    live = {"GPipe": [MICROBATCHES] * STAGES, "1F1B": [min(STAGES - stage, MICROBATCHES) for stage in range(STAGES)]}
    rows = {}
    for which, name in enumerate(live):
        stages = [result[which] for result in found]
        print(f"{name}: bubble {stages[0]['bubble']:.1%} measured, {closed:.1%} by (p - 1) / (m + p - 1)")
        for number, stage in enumerate(stages):
            print(f"  stage {number}  at most {stage['live']} live microbatches   {stage['order']}")
        rows[f"{name} losses"] = losses, stages[-1]["losses"]
        rows[f"{name} weights"] = flatten(alone.parameters()), flatten(stage["weights"] for stage in stages)
        rows[f"{name} live"] = torch.tensor(live[name]), torch.tensor([stage["live"] for stage in stages])
    sys.exit(compare(rows))
