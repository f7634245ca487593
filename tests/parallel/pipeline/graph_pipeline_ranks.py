"""One rank of a pipeline along a graph, over many schedules and models; it prints differences from one process.

`python -m tests.parallel.pipeline.graph_pipeline_ranks MODEL:SCHEDULE ...`, started by `run_ranks`.
"""

import json
import os
import sys
from typing import Any

import torch

from paceline.comm.process_group import LaunchInfo, World
from paceline.parallel.pipeline.graph.cut_points import plan_graph
from paceline.parallel.pipeline.graph.stages import GraphStages
from paceline.schedule.lowering import forward_only
from paceline.schedule.registry import build
from paceline.step.pipeline.schedule_interpreter import Pipeline
from paceline.step.pipeline.stage_worker import StageRunner, sum_tied_gradients_over_stages
from paceline.torch_internals.rng import RandomStreams
from tests.parallel.pipeline.graph_models import CASES, built

MICRO = 4


def main() -> None:
    torch.set_num_threads(1)
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=120)
    answers = {word: one(word, world) for word in sys.argv[1:]}
    world.barrier()
    print(json.dumps(answers))
    world.close()


def one(word: str, world: World) -> dict[str, Any]:
    name, schedule, *fault = word.split(":")
    case, program = CASES[name], build(schedule, ranks=world.world_size, micro=MICRO)
    losses, looked, right, weights = whole(name)
    model, streams = built(name), RandomStreams(seed=3)
    plan = plan_graph(model, num_stages=program.num_stages, call=lambda: case.loss(model, 0))
    streams.attach(model)
    stages = GraphStages(
        model, split=plan.split, owned_stages=program.stages_of(world.rank), empty_model=plan.empty_model
    )
    if fault:
        plant(stages)
    work = StageRunner(
        stages, run_model=lambda j: case.loss(model, j), before_forward=lambda j: streams.enter(step=0, microbatch=j)
    )
    Pipeline(program, world=world).run(work)
    sum_tied_gradients_over_stages(model, split=plan.split, rank_of_stage=program.rank_of_stage, world=world)
    held = {
        n: p
        for n, p in model.named_parameters()
        if any(n in plan.split.stages[s].parameters for s in stages.owned_stages)
    }
    apart = {n: far(p.grad, right[n]) for n, p in held.items()}
    torch.optim.SGD(held.values(), lr=0.1).step()
    moved = {n: far(p, weights[n]) for n, p in held.items()}
    model.eval()
    looks = StageRunner(stages, run_model=lambda j: case.loss(model, j))
    Pipeline(forward_only(rank_of_stage=program.rank_of_stage, micro=1), world=world).run(looks)
    last = world.rank == program.loss_rank
    return {
        "losses": not last or [float(work.results[j]) for j in range(MICRO)] == losses,
        "looked": not last or abs(float(looks.results[0]) - looked) <= (1e-5 * abs(looked) if plan.split.ties else 0),
        "differs": sorted(n for n in held if apart[n] or moved[n]),
        "far": max([*apart.values(), *moved.values()]),
        "ties": sorted(plan.split.ties),
        "stages": program.num_stages,
    }


def plant(stages: GraphStages) -> None:
    """The last value that crosses is lost on the way."""
    plain = stages._unpack_received

    def dropped(*given: Any) -> dict[str, torch.Tensor]:
        values = plain(*given)
        last = list(values)[-1]
        return {**values, last: torch.zeros_like(values[last])}

    stages._unpack_received = dropped  # type: ignore[method-assign]


def whole(name: str) -> tuple[list[float], float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One process: losses, the loss after the update without dropout, gradients and weights."""
    model, streams, losses = built(name), RandomStreams(seed=3), []
    streams.attach(model)
    for microbatch in range(MICRO):
        streams.enter(step=0, microbatch=microbatch)
        losses.append(CASES[name].loss(model, microbatch))
        losses[-1].backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        looked = float(CASES[name].loss(model.eval(), 0))
    return [float(loss.detach()) for loss in losses], looked, gradients, dict(model.named_parameters())


def far(found: torch.Tensor | None, right: torch.Tensor) -> float:
    if found is None:
        return 1.0
    return float((found.detach() - right.detach()).norm() / right.detach().norm().clamp(min=1e-30))


if __name__ == "__main__":
    main()
