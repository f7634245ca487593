"""One of four ranks: two stages, each sharded or compiled over two ranks; it prints differences from one process."""

import copy
import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.comm.process_group import LaunchInfo, World
from paceline.parallel.pipeline.chain.split import plan_stage_split
from paceline.parallel.pipeline.chain.stages import Stages
from paceline.parallel.pipeline.free_memory import absent_parameters
from paceline.schedule.registry import build
from paceline.step.pipeline.schedule_interpreter import Pipeline
from paceline.step.pipeline.stage_worker import StageRunner
from paceline.torch_internals.rng import RandomStreams
from tests.parallel.pipeline.chain_models import CASES, built


def main() -> None:
    torch.set_num_threads(1)
    everybody = World.join(
        launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=60
    )
    mesh = init_device_mesh("cpu", (2, everybody.world_size // 2), mesh_dim_names=("pp", "dp"))
    group = mesh["pp"].get_group()
    world = World(rank=mesh["pp"].get_local_rank(), world_size=2, backend="gloo", group=group)
    answers = {word: one(word, mesh, world) for word in sys.argv[1:]}
    everybody.barrier()
    print(json.dumps(answers))
    everybody.close()


def one(word: str, mesh: Any, world: World) -> dict[str, Any]:
    name, schedule, how = word.split(":")
    case, replica, replicas = CASES[name], mesh["dp"].get_local_rank(), mesh["dp"].size()
    program = build(schedule, ranks=2, micro=3)
    model = built(name)
    right = whole(name, 3 * replicas)
    cut = plan_stage_split(model, num_stages=program.num_stages, call=lambda: case.loss(model, 0))
    stages = Stages(model, split=cut, owned_stages=program.stages_of(world.rank))
    streams = RandomStreams(seed=3)
    streams.attach(model)
    own = {n for stage in stages.owned_stages for n in cut.stages[stage].parameters}
    modules = dict(model.named_modules())
    blocks = [
        modules[cut.blocks[b]] for s in stages.owned_stages for b in range(cut.stages[s].start, cut.stages[s].stop)
    ]
    for block in blocks if "compile" in how else ():
        block.compile(backend="eager")
    if "fsdp" in how:
        shard(
            model, blocks, hollow=absent_parameters(model, split=cut, owned_stages=stages.owned_stages), mesh=mesh["dp"]
        )
    index = lambda j: j * replicas + replica  # noqa: E731
    work = StageRunner(
        stages,
        run_model=lambda j: case.loss(model, index(j)),
        before_forward=lambda j: streams.enter(step=0, microbatch=index(j)),
    )
    pipeline = Pipeline(program, world=world, splits_backward="fsdp" not in how)
    for _ in range(2):
        model.zero_grad()
        pipeline.run(work)
    found = {}
    for n, p in model.named_parameters():
        if n in own and p.grad is not None:
            full = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else summed(p.grad, mesh["dp"])
            found[n] = float((full - right[n]).norm() / right[n].norm())
    missing = sorted(n for n in own - set(found) if n in right)
    return {
        "apart": {n: d for n, d in found.items() if d > 1e-6 and n not in cut.ties},
        "missing": missing,
        "number": len(found),
    }


def shard(model: nn.Module, blocks: list[nn.Module], *, hollow: set[nn.Parameter], mesh: Any) -> None:
    for module in [*blocks, model]:
        sharded = fully_shard(module, mesh=mesh, ignored_params=hollow)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def summed(gradient: torch.Tensor, mesh: Any) -> torch.Tensor:
    total = gradient.clone()
    torch.distributed.all_reduce(total, group=mesh.get_group())
    return total


def whole(name: str, num_micro: int) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(built(name))
    streams = RandomStreams(seed=3)
    streams.attach(model)
    for j in range(num_micro):
        streams.enter(step=0, microbatch=j)
        CASES[name].loss(model, j).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    main()
