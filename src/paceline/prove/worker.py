"""What each rank runs for `verify`: rungs, each ruling something out, and one verdict."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.job import Job
from paceline.order.cursor import Cursor
from paceline.prove.free import run_free
from paceline.prove.lockstep import BITWISE, DIFFERENT, ROUNDING, Finding, Lockstep
from paceline.prove.reference import Reference, Spec
from paceline.prove.single import run_single
from paceline.spec.task import Task
from paceline.store.disk import write_json
from paceline.train.built import Built, build
from paceline.train.session import Ready, join_world, prepare
from paceline.world import World

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ORDER = (BITWISE, ROUNDING, DIFFERENT)


def verify(payload: Mapping[str, Any]) -> int:
    """Run the rungs; rank 0 writes the answer."""
    task = Task.from_json(payload)
    ready = prepare(task)
    world = join_world(ready)
    rungs: list[tuple[str, str, Finding]] = []
    single = run_single(lambda: reference(ready, torch.float32), is_main=world.is_main, world=world)
    rungs.append(("one process", "a job that is not deterministic, a loss that is no sum", single))
    for dtype, name in _precisions(ready, world, rungs):
        finding = _lockstep(ready, world, dtype, int(task.options["steps"]))
        rungs.append((f"lock-step in {name}", "gradients, buffers, data or optimizer that differ", finding))
    if not any(finding.verdict == DIFFERENT for _, _, finding in rungs[1:]):
        free = run_free(
            ready, world, reference=_reference_on_main(ready, world, None), steps=int(task.options["steps"])
        )
        rungs.append(("free running", "what one step does not show", free))
    if world.is_main:
        write_json(Path(task.run) / "answer-verify.json", _answer(task, ready, rungs))
    world.close()
    return 0


def cast_to(dtype: torch.dtype | None) -> Any:
    """A function that gives every floating tensor of a batch this type."""

    def cast(value: Any) -> Any:
        if dtype is None:
            return value
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {name: cast(item) for name, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(cast(item) for item in value)
        return value

    return cast


def reference(ready: Ready, dtype: torch.dtype | None) -> Reference:
    """The one-process oracle of this job, in this precision."""
    plan, settings = ready.plan, ready.settings
    rounds = plan.replicas if settings.train.buffers == "sync_bn" else 1
    spec = Spec(
        seed=settings.seed,
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size * rounds,
        max_grad_norm=settings.train.max_grad_norm,
        drop_last=settings.data.drop_last,
        autocast=None if dtype is torch.float64 else _AUTOCAST.get(settings.train.precision),
        sample_seeds=settings.data.sample_seeds,
    )
    return Reference(job=_in(ready.job, dtype), spec=spec, cast=cast_to(dtype))


def _in(job: Job, dtype: torch.dtype | None) -> Job:
    """The job with its model in this precision."""
    return job if dtype is None else replace(job, model=lambda: job.model().to(dtype))


def _precisions(ready: Ready, world: World, rungs: list[Any]) -> list[tuple[torch.dtype | None, str]]:
    """float64 first, where the model can do it; then the job's own."""
    problem = ""
    if world.is_main:
        try:
            reference(ready, torch.float64).gradient(step=0, epoch=0, position=0)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problem = world.share_json(problem)
    own: tuple[torch.dtype | None, str] = (None, ready.settings.train.precision)
    if problem:
        rungs[0][2].detail += f" float64 was left out: the model can't do it ({problem})."
        return [own]
    return [(torch.float64, "float64"), own]


def _reference_on_main(ready: Ready, world: World, dtype: torch.dtype | None) -> Reference | None:
    return reference(ready, dtype) if world.is_main else None


def _lockstep(ready: Ready, world: World, dtype: torch.dtype | None, steps: int) -> Finding:
    built = _built(ready, world, dtype)
    found = Lockstep(built=built, reference=_reference_on_main(ready, world, dtype)).run(cursors(ready, steps))
    built.close()
    return found


def _built(ready: Ready, world: World, dtype: torch.dtype | None) -> Built:
    settings = ready.settings
    cast = cast_to(dtype)
    job = _in(ready.job, dtype)
    if dtype is not None:
        forward = job.forward
        job = replace(job, collate=_casting(job, cast), forward=forward)
        settings = replace(settings, train=replace(settings.train, precision="fp32"))
    return build(job=job, settings=settings, plan=ready.plan, world=world)


def _casting(job: Job, cast: Any) -> Any:
    collate = job.collate or torch.utils.data.default_collate
    return lambda rows: cast(collate(rows))


def cursors(ready: Ready, steps: int) -> list[Cursor]:
    """The first steps of an epoch, and as the last one its short last batch, where there is one."""
    size = ready.plan.global_batch_size
    found = [Cursor(epoch=0, position=k * size, samples=k * size, step=k) for k in range(steps)]
    total = reference(ready, None).num_samples
    if total is None or total <= size:
        return found[:1]
    fitting = [cursor for cursor in found if cursor.position < total]
    short = total % size
    if short and not ready.settings.data.drop_last:
        at = total - short
        fitting = [*fitting[: steps - 1], Cursor(epoch=0, position=at, samples=at, step=at // size)]
    return fitting


def _answer(task: Task, ready: Ready, rungs: list[tuple[str, str, Finding]]) -> dict[str, Any]:
    compared = [finding for _, _, finding in rungs[1:]]
    verdict = max((finding.verdict for finding in compared), key=_ORDER.index)
    first = next((f.first_difference for f in compared if f.first_difference is not None), None)
    worst = max(compared, key=lambda finding: finding.max_difference)
    lines = [
        f"{'✗' if f.verdict == DIFFERENT else '✓'} {name}: {f.verdict}. {f.detail}".strip() for name, _, f in rungs
    ]
    lines += [f"  largest difference {worst.max_difference:.2e}, noise floor of that tensor {worst.noise_floor:.2e}"]
    if first is not None:
        lines.append(f"DIFFERENT at step {first['step']}, first in {first['parameter']}: {first['cause']}")
    else:
        lines.append(f"{ready.plan.layout} on {task.ranks} ranks is the same training as one process: {verdict}")
    return {
        "verdict": verdict,
        "reference": "single",
        "layout": ready.plan.layout,
        "update": ready.plan.update,
        "ranks": task.ranks,
        "steps": int(task.options["steps"]),
        "max_difference": worst.max_difference,
        "noise_floor": worst.noise_floor,
        "first_difference": first,
        "rungs": [
            {
                "name": name,
                "rules_out": rules_out,
                "verdict": f.verdict,
                "max_difference": f.max_difference,
                "noise_floor": f.noise_floor,
                "detail": f.detail,
                "first_difference": f.first_difference,
            }
            for name, rules_out, f in rungs
        ],
        "lines": lines,
    }
