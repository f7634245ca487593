"""The measured bubble of every schedule beside the simulated one, with stages whose compute is a calibrated wait.

    python benchmarks/bubble.py                                          # all schedules on 2, 4 and 8 ranks
    python benchmarks/bubble.py --schedules zb_h1 --ranks 4 --picture zb_h1.svg

A stage sleeps in its forward, in the gradient of its input and in that of its weight, apart, and computes next to
nothing, so that eight ranks fit two cores. A rank is a process (gloo, CPU). Spans are the interpreter's own `watch`, on
the machine's one monotonic clock. `simulated` is `simulate` with the seconds that were asked for (the first stage has
no gradient of an input: its W takes all of its backward); `theory` is the papers' closed form for equal stages.
`an action` is the interpreter's own cost: what a rank's actions took without the sleeps and without waiting for
messages, and the time between them, divided by their number. Gradients are held against one process.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import LaunchInfo, World
from paceline.errors import JobError
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.run_outcome import failure_screen
from paceline.parallel.pipeline.chain.stages import StageOutput
from paceline.run_folder.run_folder import RunFolder
from paceline.schedule import SCHEDULES, Action, Costs, Program, Span, Timeline, build, draw, simulate, write
from paceline.schedule.closed_forms import PipelineCase, bubble_fraction
from paceline.schedule.text_format import parse
from paceline.step.pipeline.schedule_interpreter import Pipeline
from paceline.torch_internals.private_api import run_backward

WAITED = 2e-3
Seconds = tuple[float, float, float]
Row = dict[str, Any]


class Clock:
    """Sleeps, and knows how long it slept."""

    def __init__(self) -> None:
        self.seconds: Seconds = (0.0, 0.0, 0.0)
        self.slept = 0.0

    def sleep(self, what: int) -> None:
        """For a forward, a gradient of an input or one of a weight."""
        if self.seconds[what]:
            began = time.perf_counter()
            time.sleep(self.seconds[what])
            self.slept += time.perf_counter() - began


CLOCK = Clock()


class Waits(torch.autograd.Function):
    """The identity; sleeps in forward (`now`) and in backward (`later`), where they name something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, now: int | None, later: int) -> Tensor:
        ctx.later = later
        if now is not None:
            CLOCK.sleep(now)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        CLOCK.sleep(ctx.later)
        return gradient, None, None


def run_stage(x: Tensor, weight: Tensor) -> Tensor:
    """Sleeps on the way of the activation, and beside it on the way to the weight."""
    return Waits.apply(x * Waits.apply(weight, None, 2), 0, 1)  # type: ignore[no-any-return, no-untyped-call]


class Stages:
    """The interpreter's `Work`: a chain of stages with one weight each."""

    def __init__(self, program: Program) -> None:
        self.last = program.num_stages - 1
        self.weights = [torch.tensor(1.0 + 0.1 * number, requires_grad=True) for number in range(program.num_stages)]
        self.inputs = [torch.linspace(0.0, 1.0 + number, 64) for number in range(program.num_micro)]

    def forward(self, *, stage: int, microbatch: int, received: StageOutput | None) -> StageOutput | Tensor:
        x = self.inputs[microbatch] if received is None else received.tensors[0]
        y = run_stage(x, self.weights[stage])
        return y.sum() if stage == self.last else StageOutput(tensors=[y], spec=None)

    def backward_context(self, *, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def run_backward(self, outputs: list[Tensor], gradients: list[Tensor | None], *, microbatch: int) -> None:
        run_backward(outputs, gradients)

    def before_backward(self, *, stage: int, microbatch: int) -> None: ...

    def after_backward(self, *, stage: int, microbatch: int) -> None: ...

    def right(self, own: Sequence[int]) -> bool:
        """Whether one step's gradients are one process's."""
        alone = [weight.detach().clone().requires_grad_() for weight in self.weights]
        for x in self.inputs:
            for weight in alone:
                x = x * weight
            x.sum().backward()
        pairs = [(self.weights[number].grad, alone[number].grad) for number in own]
        return all(mine is not None and right is not None and torch.allclose(mine, right) for mine, right in pairs)


def costs_of(program: Program, seconds: Seconds) -> Costs:
    """What a step's computes are to take: nobody wants the gradient of the first stage's input by itself."""
    others = program.num_stages - 1
    return Costs(
        forward=seconds[0],
        backward_input=[0.0] + [seconds[1]] * others,
        backward_weight=[seconds[1] + seconds[2]] + [seconds[2]] * others,
    )


def worker(payload: dict[str, Any]) -> int:
    """All schedules on this many ranks, step by step in turn."""
    torch.set_num_threads(1)
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=120)
    rows: dict[str, list[Row]] = {name: [] for name in payload["programs"]}
    seconds: Seconds = tuple(payload["seconds"])
    for _ in range(payload["rounds"]):
        for name, text in payload["programs"].items():
            rows[name].append(one_step(parse(text, name=name), world=world, seconds=seconds))
    if world.is_main:
        Path(payload["answer"]).write_text(json.dumps(rows))
    world.barrier()
    world.close()
    return 0


def one_step(program: Program, *, world: World, seconds: Seconds) -> Row:
    """Run it once without sleeping, which makes connections and compares gradients, and once with."""
    work = Stages(program)
    spans: list[tuple[int, float, float]] = []
    row = program.actions[world.rank]
    pipeline = Pipeline(
        program, world=world, on_action=lambda action, began, ended: spans.append((len(spans), began, ended))
    )
    CLOCK.seconds = (0.0, 0.0, 0.0)
    pipeline.run(work)
    if not work.right(program.stages_of(world.rank)):
        raise JobError(f"{program.name}: gradients are not those of one process.")
    spans.clear()
    CLOCK.seconds, CLOCK.slept = seconds, 0.0
    world.barrier()
    pipeline.run(work)
    told = {"spans": spans, "own": own_cost(row, spans, slept=CLOCK.slept)}
    everybody = world.gather_json(told)
    return {
        "spans": [each["spans"] for each in everybody],
        "own": mean(each["own"] for each in everybody),
        "gradients": True,
    }


def own_cost(row: Sequence[Action], spans: Sequence[tuple[int, float, float]], *, slept: float) -> float:
    """Seconds an action; of receives, which wait, the quickest one's for each, or none where all have waited."""
    took = [ended - began for _, began, ended in spans]
    between = spans[-1][2] - spans[0][1] - sum(took)
    receives = [t for action, t in zip(row, took, strict=True) if action.op.is_receive]
    if min(receives, default=WAITED) >= WAITED:
        receives = []
    others = [t for action, t in zip(row, took, strict=True) if not action.op.is_receive]
    spent = between + sum(others) - slept + len(receives) * min(receives, default=0.0)
    return spent / (len(others) + len(receives))


def measured(program: Program, row: Row) -> Timeline:
    """The step as it went."""
    spans = [
        Span(rank=rank, action=program.actions[rank][number], start=began, stop=ended)
        for rank, found in enumerate(row["spans"])
        for number, began, ended in found
    ]
    start = min(span.start for span in spans if span.action.op.is_compute)
    moved = [Span(rank=s.rank, action=s.action, start=s.start - start, stop=s.stop - start) for s in spans]
    return Timeline(name=f"{program.name}, measured", num_ranks=program.num_ranks, spans=tuple(moved))


def measure(programs: dict[str, Program], *, ranks: int, rounds: int, seconds: Seconds) -> dict[str, list[Row]]:
    """Start the ranks and read what they saw."""
    folder = Path(tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    texts = {name: write(program) for name, program in programs.items()}
    payload = {"programs": texts, "rounds": rounds, "seconds": seconds, "answer": str(folder / "answer.json")}
    outcome = start(LaunchRequest(ranks=ranks, run=RunFolder(folder), entry="bubble:worker", payload=payload))
    if outcome.exit_code:
        sys.exit(failure_screen(outcome))
    found: dict[str, list[Row]] = json.loads((folder / "answer.json").read_text())
    return found


def line(program: Program, rows: Sequence[Row], *, seconds: Seconds) -> tuple[str, float]:
    """One of the table, and how far the bubble is from the simulation in percentage points."""
    schedule = SCHEDULES[program.name]
    case = PipelineCase(
        ranks=program.num_ranks, micro=program.num_micro, virtual=program.num_stages // program.num_ranks,
        forward=seconds[0], backward_input=seconds[1], backward_weight=seconds[2],
    )  # fmt: skip
    planned = simulate(program, costs=costs_of(program, seconds))
    theory = bubble_fraction(schedule.makespan, case)
    lines = [measured(program, row) for row in rows]
    bubbles = sorted(timeline.bubble for timeline in lines)
    off = 100 * (median(bubbles) - planned.bubble)
    longer = median(timeline.makespan for timeline in lines) / planned.makespan
    text = (
        f"{program.num_ranks:5} {program.name:<15}{program.num_micro:6} {planned.bubble:9.2%} "
        f"{'-' if theory is None else f'{theory:.2%}':>8} {median(bubbles):9.2%} {bubbles[0]:8.2%} {bubbles[-1]:8.2%} "
        f"{off:+7.2f} {longer:9.4f} {1e6 * median(row['own'] for row in rows):8.0f} us"
    )
    return text, off


HEAD = (
    f"{'ranks':>5} {'schedule':<15}{'micro':>6} {'simulated':>9} {'theory':>8} {'measured':>9} {'least':>8} "
    f"{'most':>8} {'points':>7} {'its step':>9} {'an action':>11}"
)


def picture(program: Program, rows: Sequence[Row], *, seconds: Seconds) -> str:
    """The planned step and the median of the measured ones."""
    lines = sorted((measured(program, row) for row in rows), key=lambda timeline: timeline.bubble)
    planned = simulate(program, costs=costs_of(program, seconds))
    return draw(planned, measured=lines[len(lines) // 2], unit="s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--micro", type=int, default=2, help="microbatches a rank (naive has one: they only repeat)")
    parser.add_argument("--wait", type=float, default=0.1, help="seconds of F, of I and of W")
    parser.add_argument("--picture", type=Path, help="an SVG of the last schedule on the last number of ranks")
    asked = parser.parse_args()
    seconds: Seconds = (asked.wait, asked.wait, asked.wait)
    print(f"{asked.rounds} rounds, F, I and W of {1e3 * asked.wait:g} ms, torch {torch.__version__}\n{HEAD}")
    worst, drawn = 0.0, ""
    for ranks in asked.ranks:
        programs = {
            name: build(name, ranks=ranks, micro=ranks * (1 if name == "naive" else asked.micro))
            for name in asked.schedules
        }
        found = measure(programs, ranks=ranks, rounds=asked.rounds, seconds=seconds)
        for name, program in programs.items():
            text, off = line(program, found[name], seconds=seconds)
            worst = max(worst, abs(off))
            drawn = picture(program, found[name], seconds=seconds)
            print(text, flush=True)
    print(f"farthest from the simulation: {worst:.2f} percentage points; gradients those of one process")
    if asked.picture is not None:
        asked.picture.write_text(drawn)


if __name__ == "__main__":
    main()
