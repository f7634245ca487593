"""Run by test_resume_in_another_layout.py: `python -m tests.trainer.layout_run_ranks RANKS FOLDER CASES` forks that many gloo ranks.

They play one run after another in the same processes. A case is [name, layout, checkpoint or "", job] and perhaps settings,
and each leaves `NAME/answer.json` with the losses and the samples of its steps, the last loss scale and metrics.
"""

import contextlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.launch.launch_environment import KERNELS_VARIABLE
from paceline.trainer.run import Run
from paceline.trainer.session import open_session

SETTINGS = {
    "train.steps": 3,
    "train.micro_batch_size": 2,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
}


def play(case: list[Any], *, folder: Path, world: World) -> None:
    name, layout, start, job = case[:4]
    settings = {**SETTINGS, **(case[4] if len(case) > 4 else {})}
    task = Task(
        verb="train",
        job=job,
        layout=layout,
        ranks=world.world_size,
        device="cpu",
        run=str(folder / name),
        resume=start or None,
        settings={**settings, "train.exact": KERNELS_VARIABLE in os.environ},
        origins=dict.fromkeys([*settings, "train.exact"], "test"),
    )
    run = Run.worker(task)
    assert run._prepared_job is not None
    session = run._session = open_session(run._prepared_job, world=world, on_eval_argument=run)
    begun = session.loop.cursor.samples
    losses = [run.step(batch).loss for batch in run.batches()]
    answer: dict[str, Any] = {"begun": begun, "losses": losses, "samples": session.loop.cursor.samples}
    scaler, has_eval = session.setup.update.scaler, session.setup.job.eval_data is not None
    answer |= {"scale": None if scaler is None else scaler.get_scale()}
    answer |= {"metrics": session.loop.evaluate().metrics if has_eval else {}}
    assert session.finish() == 0
    answer["whole"] = session.setup.weights.is_unsharded and session.setup.optim_shards.is_unsharded
    session._loader.close()
    session.event_bus.close()
    session.setup.close()
    if world.is_main:
        (folder / name / "answer.json").write_text(json.dumps(answer))


def one_rank(rank: int, ranks: int, folder: Path, cases: list[list[Any]]) -> None:
    torch.set_num_threads(1)
    world = World.alone()
    if ranks > 1:
        meet = f"file://{folder}/meet-{ranks}-{cases[0][0]}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        world = World(rank=rank, world_size=ranks, local_rank=rank, backend="gloo", group=dist.group.WORLD)
    for case in cases:
        try:
            play(case, folder=folder, world=world)
        except BaseException:
            print(f"rank {rank}: {case}", file=sys.stderr)
            raise
    world.barrier()
    world.close()


def main() -> int:
    ranks, folder, cases = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                one_rank(rank, ranks, folder, cases)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = []
    for _ in children:
        child, status = os.wait()
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:  # the others would wait for it
            for other in children:
                if other != child:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, 9)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
