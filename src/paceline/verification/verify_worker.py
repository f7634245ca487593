"""The worker of `paceline verify`: it runs the rungs, each of which rules something out, and forms one verdict."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.comm.process_group import LaunchInfo, World
from paceline.config.secret_settings import mask_value
from paceline.config.task import Task
from paceline.console import output
from paceline.data.order.cursor import Cursor
from paceline.data.source import refuse_no_batch
from paceline.errors import JobError
from paceline.filesystem.atomic_files import write_json
from paceline.profiling.environment import code_facts
from paceline.run_folder.run_folder import RunFolder
from paceline.step.update_rules import step_rule
from paceline.torch_internals.private_api import guard_hooks
from paceline.trainer.setup.build_training_setup import TrainingSetup, begun_whole
from paceline.trainer.setup.job_data import JobData
from paceline.trainer.setup.optimizers import lr_factor
from paceline.trainer.setup.prepare import PreparedJob, is_gradient_worker, join_world, prepare
from paceline.verification.compare_in_lockstep import Lockstep
from paceline.verification.compare_independent_runs import WeightDrift
from paceline.verification.precision import LOSS_SCALE, build_in_precision, cast_to, job_in
from paceline.verification.reference.compressed import refuse_joined
from paceline.verification.reference.dropout_isolation import has_dropout, without_dropout
from paceline.verification.reference.float64_mode import in_double
from paceline.verification.reference.parameter_server import WorkerInstructions, run_errands
from paceline.verification.reference.reference import Reference, ReferenceConfig, RunPosition
from paceline.verification.reference.select_reference import allowed_drift, rule_reference, select_reference
from paceline.verification.rung_result import DIFFERENT, RungResult
from paceline.verification.verify_answer import Rung, verify_answer
from paceline.verification.verify_single_process import run_single

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_GRID = 2.0**-24
_LEAST_SCALE, _HEADROOM = 2.0**-14, 16.0
_START = RunPosition(step=0, epoch=0, position=0)


def verify(payload: Mapping[str, Any]) -> int:
    """Run all rungs; rank 0 writes the answer."""
    task = Task.from_json(payload)
    ready = prepare(task)
    task = ready.task
    if is_gradient_worker(ready):
        return run_errands(ready, LaunchInfo.read(os.environ))
    world = join_world(ready)
    found = run_all_rungs(ready, world, steps=int(task.options["steps"]))
    if world.is_main:
        masked = {name: mask_value(name, value) for name, value in task.settings.items()}
        about = {**code_facts(task.job), "device": world.device.type, "settings": masked}
        write_json(RunFolder(Path(task.run)).answer("verify"), {**found, "about": about})
    world.close()
    return 0


def run_all_rungs(ready: PreparedJob, world: World, *, steps: int) -> dict[str, Any]:
    """Run all rungs on an existing world, and return the answer, which is the same on every rank."""
    refuse_joined(ready.plan.wire, buffers=ready.settings.train.buffers)
    errands = WorkerInstructions(world)
    guard_hooks()  # before the first model is built: the reference's has the same class and no hooks
    scale = _fitting_scale(ready, world)
    rungs = [
        _rung("one process", "a job that is not deterministic, a loss that is not a sum", lambda: _single(ready, world))
    ]
    verified = step_rule(ready.plan.rule).traits.verified
    if rungs[0].result.verdict != DIFFERENT and verified == "replayed":
        rungs += _replayed_rungs(ready, world, steps, rungs[0].result, errands)
    elif rungs[0].result.verdict != DIFFERENT and (verified == "freely" or ready.plan.wire.is_on):
        rungs += _independent_rungs(ready, world, steps, rungs[0].result, scale)
    elif rungs[0].result.verdict != DIFFERENT:
        cursors = _steps_to_compare(ready, world, steps, rungs[0].result)
        for dtype, name in _precisions(ready, world, rungs[0].result):
            rules_out = "samples, gradients, loss, buffers or optimizer that differ"
            run = partial(_run_lockstep, ready, world, dtype, name, cursors, scale)
            rungs.append(_rung(f"lockstep in {name}", rules_out, run))
        if all(rung.result.verdict != DIFFERENT for rung in rungs):
            rungs.append(
                _rung(
                    "free running",
                    "what one step does not show, evaluation",
                    partial(_run_independently, ready, world, min(steps, len(cursors)), scale=scale),
                )
            )
    plan = ready.plan
    errands.end()
    how = {"update": plan.update, "compress": plan.compress}
    micro = plan.micro_batch_size
    return verify_answer(
        rungs=rungs, layout=plan.layout, ranks=ready.task.ranks, steps=steps, micro_batch_size=micro, **how
    )


def _replayed_rungs(
    ready: PreparedJob, world: World, steps: int, single: RungResult, errands: WorkerInstructions
) -> Iterator[Rung]:
    """Yield the rungs for parameter servers: workers run freely, and one process replays the order they took."""
    rules_out = "samples, gradients, weight versions, loss, optimizer or evaluation that differ"
    for dtype, name in _precisions(ready, world, single):
        run = partial(_run_independently, ready, errands.next(dtype), steps, dtype=dtype)
        rung = _rung(f"repeated in {name}", rules_out, run)
        yield rung
        if rung.result.verdict == DIFFERENT:
            return


def _independent_rungs(
    ready: PreparedJob, world: World, steps: int, single: RungResult, scale: float
) -> Iterator[Rung]:
    """Yield free runs in each precision, for rules whose steps depend on earlier steps and cannot be compared alone."""
    for dtype, name in _precisions(ready, world, single):
        rules_out, drift = allowed_drift(ready.plan, is_double=dtype is torch.float64)
        run = partial(_run_independently, ready, world, steps, dtype=dtype, drift=drift, scale=scale)
        rung = _rung(f"free running in {name}", rules_out, run)
        yield rung
        if rung.result.verdict == DIFFERENT:
            return


def reference(
    ready: PreparedJob,
    dtype: torch.dtype | None,
    *,
    make: Callable[..., Reference] = Reference,
    scale: float = LOSS_SCALE,
) -> Reference:
    """Return the one-process reference of this job in this precision; `make` constructs that of another update rule."""
    plan, settings = ready.plan, ready.settings
    is_joined = settings.train.buffers == "sync_bn"
    spec = ReferenceConfig(
        seed=settings.seed,
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        max_grad_norm=settings.train.max_grad_norm,
        drop_last=settings.data.drop_last,
        autocast=None if dtype is torch.float64 else _AUTOCAST.get(settings.train.precision),
        sample_seeds=settings.data.sample_seeds,
        together=plan.replicas if is_joined else 1,
        lr_factor=lr_factor(settings.train.lr_scaling, plan.global_batch_size / ready.job.global_batch_size),
        device=plan.device,
        grid=_GRID if settings.train.exact else 0.0,
        shards=settings.data.shards,
        workers=JobData(ready.job, settings).workers,
        is_cut=max(plan.mesh.tp, plan.mesh.cp, plan.mesh.ep) > 1 or is_joined,
        own_kernels=plan.mesh.cp > 1 or is_joined,
        on_empty=settings.train.on_empty,
        loss_scale=scale if dtype is not torch.float64 and settings.train.precision == "fp16" else 1.0,
    )
    job = job_in(ready.job, dtype)
    job, cast = replace(job, model=begun_whole(job, settings)), cast_to(dtype)
    return make(job=job, spec=spec, cast=cast)


def compared_steps(ready: PreparedJob, steps: int) -> list[Cursor]:
    """Return the first steps of an epoch, and last its short final batch, if there is one."""
    size = ready.plan.global_batch_size
    reading = reference(ready, None).reading
    total = reading.num_samples(0)
    if total is not None and ready.settings.data.drop_last:
        refuse_no_batch(total, batch=size)
    found = [Cursor(epoch=0, position=k * size, samples=k * size, step=k) for k in range(steps)]
    if total is None:
        return [one for one in found if reading.batch(epoch=0, position=one.position, size=size)] or found[:1]
    fitting = [cursor for cursor in found if cursor.position + size <= total]
    short = total % size
    if short and not ready.settings.data.drop_last:
        at = total - short
        last = Cursor(epoch=0, position=at, samples=at, step=at // size)
        fitting = [*fitting[: max(steps - 1, 1)], last] if fitting else [last]
    return fitting


def _steps_to_compare(ready: PreparedJob, world: World, steps: int, single: RungResult) -> list[Cursor]:
    """Return the steps to compare; the short final batch is included only if one process can run it at all."""
    found = compared_steps(ready, steps)
    last, problem = found[-1], ""
    if world.is_main:
        try:
            reference(ready, None).gradient(RunPosition(step=last.step, epoch=last.epoch, position=last.position))
        except Exception as error:
            problem = _first_line(error)
    problem = world.share_json(problem)
    if not problem or len(found) == 1:
        return found
    asked = ready.settings.train.steps
    if asked is None or asked > last.step:
        raise JobError(
            f"step {last.step + 1}, the epoch's short last batch, can't be run, not even by one process: {problem}",
            cause="a layer (BatchNorm), the loss or the collation needs more samples than are left over",
            hint="--data.drop_last true, or a global_batch_size that leaves more samples over",
        )
    single.detail += f" Step {last.step + 1}, a short batch that train.steps={asked} does not reach, was left out."
    return found[:-1]


def _fitting_scale(ready: PreparedJob, world: World) -> float:
    """Return the fp16 loss scale, reduced until the first step of one process does not overflow."""
    if ready.settings.train.precision != "fp16":
        return LOSS_SCALE
    scale = LOSS_SCALE
    if world.is_main:
        while scale > _LEAST_SCALE and not _is_finite(reference(ready, None, scale=scale)):
            scale /= 2.0
        scale = LOSS_SCALE if scale in (LOSS_SCALE, _LEAST_SCALE) else scale / _HEADROOM
    found: float = world.share_json(scale)
    return found


def _is_finite(alone: Reference) -> bool:
    try:
        return all(bool(torch.isfinite(value).all()) for value in alone.gradient(_START).total.values())
    except Exception:  # the first rung reports it
        return True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _rung(name: str, rules_out: str, run: Callable[[], RungResult]) -> Rung:
    began = time.perf_counter()
    rung_result = run()
    return Rung(name=name, rules_out=rules_out, result=rung_result, seconds=time.perf_counter() - began)


def _say(world: World, what: str) -> Callable[[str], None]:
    """Return a function that prints progress on rank 0."""

    def say(text: str) -> None:
        if world.is_main:
            output.print_line(f"verify: {what}: {text}")

    return say


def _single(ready: PreparedJob, world: World) -> RungResult:
    rung_result = RungResult()
    _say(world, "one process")("the same batch twice, then in halves")
    if world.is_main:
        rung_result = run_single(lambda: reference(ready, None))
    found: RungResult = RungResult(**world.share_json(vars(rung_result)))
    return found


def _precisions(ready: PreparedJob, world: World, single: RungResult) -> list[tuple[torch.dtype | None, str]]:
    """Return the precisions to compare in: float64 first, if the model supports it, then the job's own."""
    problem = ""
    if world.is_main:
        try:
            with in_double():
                reference(ready, torch.float64).gradient(_START)
        except Exception as error:
            problem = _first_line(error)
    problem = world.share_json(problem)
    own: tuple[torch.dtype | None, str] = (None, ready.settings.train.precision)
    if problem:
        single.detail += f" float64 was left out: the model does not support it ({problem})."
        return [own]
    return [(torch.float64, "float64"), own]


def _run_lockstep(
    ready: PreparedJob, world: World, dtype: torch.dtype | None, name: str, cursors: Sequence[Cursor], scale: float
) -> RungResult:
    """Compare each of these steps with one process, which starts every step from the ranks' weights."""
    with in_double(active=dtype is torch.float64):
        built = build_in_precision(ready, world, dtype, scale=scale)
        alone = reference(ready, dtype, scale=scale) if world.is_main else None
        lockstep = Lockstep(built=built, reference=alone, say=_say(world, name))
        with _comparable(ready, built, alone) as note:
            lockstep.rung_result.detail = " ".join([note, *(f"{text}." for text in built.notes)]).strip()
            found = lockstep.run(cursors)
        built.close()
        return found


@contextmanager
def _comparable(ready: PreparedJob, built: TrainingSetup, alone: Reference | None) -> Iterator[str]:
    """Disable dropout where one process cannot draw the same random numbers, and yield a note about it."""
    if ready.settings.train.buffers != "sync_bn" or not has_dropout(built.model):
        yield ""
        return
    with without_dropout([*built.models] if alone is None else [*built.models, alone.model]):
        yield "Dropout is off here: under sync_bn one process can't draw each replica's random numbers."


def _run_independently(
    ready: PreparedJob,
    world: World,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    drift: WeightDrift | None = None,
    scale: float = LOSS_SCALE,
) -> RungResult:
    """Let the ranks and one process train for `steps` steps on their own, and compare what they end with."""
    with in_double(active=dtype is torch.float64):
        built = build_in_precision(ready, world, dtype, scale=scale)
        alone = reference(ready, dtype, make=select_reference(built), scale=scale) if world.is_main else None
        with _comparable(ready, built, alone):
            say = _say(world, "free running")
            found = rule_reference(ready.plan).compare(built, reference=alone, steps=steps, say=say, drift=drift)
        built.close()
        return found
