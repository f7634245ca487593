"""One rank of a pipeline, over many schedules and models; it prints differences from one process.

`python -m tests.parallel.pipeline.chain_pipeline_ranks MODEL:SCHEDULE:MICROBATCHES ...`, started by `run_ranks`.
"""

import copy
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from paceline.comm.process_group import LaunchInfo, World
from paceline.parallel.pipeline.chain.split import plan_stage_split
from paceline.parallel.pipeline.chain.stages import Stages
from paceline.schedule.lowering import forward_only
from paceline.schedule.registry import build
from paceline.step.pipeline.schedule_interpreter import Pipeline
from paceline.step.pipeline.stage_worker import StageRunner, sum_tied_gradients_over_stages
from paceline.torch_internals.rng import RandomStreams
from tests.forked_ranks import run_forked
from tests.parallel.pipeline.chain_models import CASES, built

ROOT = Path(__file__).resolve().parents[3]


def run_ranks(
    words: Sequence[str],
    *,
    ranks: int,
    timeout: float = 120,
    module: str = "tests.parallel.pipeline.chain_pipeline_ranks",
) -> list[dict[str, Any]]:
    """Every rank's answers."""
    environ = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with TemporaryDirectory() as folder:
        told = run_forked(module, words, ranks=ranks, folder=Path(folder), environ=environ, timeout=timeout)
    return [json.loads(out.splitlines()[-1]) for out in told]


def main() -> None:
    torch.set_num_threads(1)
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=60)
    answers = {word: one(word, world) for word in sys.argv[1:]}
    world.barrier()
    print(json.dumps(answers))
    world.close()


def one(word: str, world: World) -> dict[str, Any]:
    name, schedule, num_micro, *options = word.split(":")
    program = build(schedule, ranks=world.world_size, micro=int(num_micro))
    model = built(name)
    case = CASES[name]
    losses, right = whole(name, int(num_micro))
    cut = plan_stage_split(model, num_stages=program.num_stages, call=lambda: case.loss(model, 0))
    streams = RandomStreams(seed=3)
    streams.attach(model)
    stages = Stages(model, split=cut, owned_stages=program.stages_of(world.rank))
    work = StageRunner(
        stages, run_model=lambda j: case.loss(model, j), before_forward=lambda j: streams.enter(step=0, microbatch=j)
    )
    fired: dict[str, int] = {}
    for n, p in model.named_parameters():
        if p.device.type != "meta":
            p.register_post_accumulate_grad_hook(lambda _, n=n: fired.update({n: fired.get(n, 0) + 1}))
    pipeline = Pipeline(program, world=world, splits_backward="whole" not in options)
    pipeline.run(work)
    sum_tied_gradients_over_stages(model, split=cut, rank_of_stage=program.rank_of_stage, world=world)
    own = {n for stage in stages.owned_stages for n in cut.stages[stage].parameters}
    answer: dict[str, Any] = {"differs": {}, "missing": [], "extra": [], "held": len(own), "bytes": pipeline.sent_bytes}
    for n, p in model.named_parameters():
        if n in own and (p.grad is None) != (n not in right):
            answer["missing" if p.grad is None else "extra"].append(n)
        elif n in own and p.grad is not None and not torch.equal(p.grad, right[n]):
            answer["differs"][n] = float((p.grad - right[n]).norm() / right[n].norm())
    answer["ties"] = list(cut.ties)
    answer["fired"] = sorted(set(fired.values()))
    answer["losses"] = all(torch.equal(losses[j], value) for j, value in work.results.items())
    answer["last"] = len(work.results) == (int(num_micro) if world.rank == program.loss_rank else 0)
    forward = forward_only(rank_of_stage=program.rank_of_stage, micro=int(num_micro))
    again = StageRunner(stages, run_model=work._run_model, before_forward=lambda j: streams.enter(step=0, microbatch=j))
    Pipeline(forward, world=world).run(again)
    answer["forward"] = all(torch.equal(losses[j], value) for j, value in again.results.items())
    return answer


def whole(name: str, num_micro: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """One process."""
    model = copy.deepcopy(built(name))
    streams = RandomStreams(seed=3)
    streams.attach(model)
    losses = []
    for j in range(num_micro):
        streams.enter(step=0, microbatch=j)
        losses.append(CASES[name].loss(model, j))
        losses[-1].backward()
    return [loss.detach() for loss in losses], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    main()
