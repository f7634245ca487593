"""Worker process of `paceline verify`: it runs the rungs and combines their results into one verdict."""

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
from paceline.torch_internals.private_api import recompile_on_hook_changes
from paceline.trainer.setup.build_training_setup import TrainingSetup, full_model_builder
from paceline.trainer.setup.job_data import JobData
from paceline.trainer.setup.optimizers import lr_factor
from paceline.trainer.setup.prepare import PreparedJob, is_gradient_worker, join_world, prepare
from paceline.verification.compare_in_lockstep import LockstepComparison
from paceline.verification.compare_independent_runs import WeightDrift
from paceline.verification.precision import LOSS_SCALE, build_in_precision, cast_job, make_cast
from paceline.verification.reference.compressed import refuse_compression_with_sync_bn
from paceline.verification.reference.dropout_isolation import has_dropout, without_dropout
from paceline.verification.reference.float64_mode import keep_float64
from paceline.verification.reference.parameter_server import WorkerInstructions, run_gradient_worker
from paceline.verification.reference.reference import Reference, ReferenceConfig, RunPosition
from paceline.verification.reference.select_reference import allowed_drift, rule_reference, select_reference
from paceline.verification.reference.step_coverage import coverage_gaps
from paceline.verification.rung_result import DIFFERENT, RungResult
from paceline.verification.verify_answer import Rung, verify_answer
from paceline.verification.verify_single_process import verify_single_process

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_GRID_STEP = 2.0**-24  # exact mode rounds a gradient to multiples of this, relative to its largest element
_MIN_LOSS_SCALE = 2.0**-14
_LOSS_SCALE_HEADROOM = 16.0  # a reduced loss scale is divided by this too, since later gradients may be larger
_START = RunPosition(steps_done=0, epoch=0, batch_start=0)


def verify(payload: Mapping[str, Any]) -> int:
    """Run all rungs of one `paceline verify`; rank 0 writes the answer. Return the exit status."""
    task = Task.from_json(payload)
    prepared_job = prepare(task)
    task = prepared_job.task
    if is_gradient_worker(prepared_job):
        return run_gradient_worker(prepared_job, LaunchInfo.read(os.environ))
    world = join_world(prepared_job)
    answer = run_all_rungs(prepared_job, world, steps=int(task.options["steps"]))
    if world.is_main:
        masked_settings = {name: mask_value(name, value) for name, value in task.settings.items()}
        metadata = {**code_facts(task.job), "device": world.device.type, "settings": masked_settings}
        write_json(RunFolder(Path(task.run)).answer("verify"), {**answer, "about": metadata})
    world.close()
    return 0


def run_all_rungs(prepared_job: PreparedJob, world: World, *, steps: int) -> dict[str, Any]:
    """Run all rungs on an existing world, and return the answer.

    The answer is the same on every rank, except for the seconds of each rung.
    """
    refuse_compression_with_sync_bn(prepared_job.plan.compression, buffers=prepared_job.settings.train.buffers)
    instructions = WorkerInstructions(world)
    # The layout's model and the reference's model have the same class, but different module hooks. Without this call,
    # compiled models would run each other's hooks or none. The call must come before the first model is built.
    recompile_on_hook_changes()
    loss_scale = _find_loss_scale(prepared_job, world)
    rules_out = "a job that is not deterministic, a loss that is not a sum"
    rungs = [_run_rung("one process", rules_out, lambda: _run_first_rung(prepared_job, world))]
    verify_mode = step_rule(prepared_job.plan.update_rule).traits.verify_mode
    if rungs[0].result.verdict != DIFFERENT and verify_mode == "replayed":
        rungs += _replayed_rungs(prepared_job, world, steps, rungs[0].result, instructions)
    elif rungs[0].result.verdict != DIFFERENT and (verify_mode == "freely" or prepared_job.plan.compression.is_on):
        rungs += _independent_rungs(prepared_job, world, steps, rungs[0].result, loss_scale)
    elif rungs[0].result.verdict != DIFFERENT:
        cursors = _steps_to_compare(prepared_job, world, steps, rungs[0].result)
        for dtype, name in _select_precisions(prepared_job, world, rungs[0].result):
            rules_out = "samples, gradients, loss, buffers or optimizer that differ"
            run = partial(_run_lockstep, prepared_job, world, dtype, name, cursors, loss_scale)
            rungs.append(_run_rung(f"lockstep in {name}", rules_out, run))
        if all(rung.result.verdict != DIFFERENT for rung in rungs):
            rungs.append(
                _run_rung(
                    "free running",
                    "errors that show only after several steps; errors of evaluation",
                    partial(_run_independently, prepared_job, world, min(steps, len(cursors)), loss_scale=loss_scale),
                )
            )
    plan = prepared_job.plan
    instructions.send_end()
    gaps = coverage_gaps(
        [rung.result.coverage for rung in rungs],
        plan=plan,
        settings=prepared_job.settings,
        draws_random_numbers=rungs[0].result.draws_random_numbers is not False,
        has_dropout_off=any(rung.result.has_dropout_off for rung in rungs),
        compares_gradients=any(rung.result.compared.get("gradients") for rung in rungs[1:]),
    )
    return verify_answer(
        rungs=rungs,
        layout=plan.layout,
        update=plan.update,
        compress=plan.compress,
        ranks=prepared_job.task.ranks,
        steps=steps,
        micro_batch_size=plan.micro_batch_size,
        not_exercised=gaps,
    )


def _replayed_rungs(
    prepared_job: PreparedJob, world: World, steps: int, single_result: RungResult, instructions: WorkerInstructions
) -> Iterator[Rung]:
    """Yield the rungs for parameter servers: workers run freely, and one process replays their updates in order."""
    rules_out = "samples, gradients, weight versions, loss, optimizer or evaluation that differ"
    for dtype, name in _select_precisions(prepared_job, world, single_result):
        run = partial(_run_independently, prepared_job, instructions.begin_rung(dtype), steps, dtype=dtype)
        rung = _run_rung(f"replayed in {name}", rules_out, run)
        yield rung
        if rung.result.verdict == DIFFERENT:
            return


def _independent_rungs(
    prepared_job: PreparedJob, world: World, steps: int, single_result: RungResult, loss_scale: float
) -> Iterator[Rung]:
    """Yield a free run in each precision, for rules whose steps depend on earlier steps: no lockstep is possible."""
    for dtype, name in _select_precisions(prepared_job, world, single_result):
        rules_out, drift = allowed_drift(prepared_job.plan, is_double=dtype is torch.float64)
        run = partial(_run_independently, prepared_job, world, steps, dtype=dtype, drift=drift, loss_scale=loss_scale)
        rung = _run_rung(f"free running in {name}", rules_out, run)
        yield rung
        if rung.result.verdict == DIFFERENT:
            return


def build_reference(
    prepared_job: PreparedJob,
    dtype: torch.dtype | None,
    *,
    constructor: Callable[..., Reference] = Reference,
    loss_scale: float = LOSS_SCALE,
) -> Reference:
    """Build the one-process reference of this job in this precision; `constructor` depends on the update rule."""
    plan, settings = prepared_job.plan, prepared_job.settings
    has_sync_bn = settings.train.buffers == "sync_bn"
    config = ReferenceConfig(
        seed=settings.seed,
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        max_grad_norm=settings.train.max_grad_norm,
        drop_last=settings.data.drop_last,
        autocast=None if dtype is torch.float64 else _AUTOCAST.get(settings.train.precision),
        sample_seeds=settings.data.sample_seeds,
        merged_microbatches=plan.replicas if has_sync_bn else 1,
        lr_factor=lr_factor(settings.train.lr_scaling, plan.global_batch_size / prepared_job.job.global_batch_size),
        device=plan.device,
        grid_step=_GRID_STEP if settings.train.exact else 0.0,
        shards=settings.data.shards,
        workers=JobData(prepared_job.job, settings).workers,
        is_sliced=max(plan.mesh.tp, plan.mesh.cp, plan.mesh.ep) > 1 or has_sync_bn,
        uses_other_kernels=plan.mesh.cp > 1 or has_sync_bn,
        on_empty=settings.train.on_empty,
        loss_scale=loss_scale if dtype is not torch.float64 and settings.train.precision == "fp16" else 1.0,
    )
    job = cast_job(prepared_job.job, dtype)
    job, cast = replace(job, model=full_model_builder(job, settings)), make_cast(dtype)
    return constructor(job=job, config=config, cast=cast)


def select_steps(prepared_job: PreparedJob, steps: int) -> list[Cursor]:
    """Return cursors of the steps to compare: an epoch's first steps, and its short final batch if there is one.

    There are at most `steps` cursors, or two if `steps` is 1 and the epoch has both a full and a short batch.
    """
    size = prepared_job.plan.global_batch_size
    reader = build_reference(prepared_job, None).reader
    total = reader.num_samples(0)
    if total is not None and prepared_job.settings.data.drop_last:
        refuse_no_batch(total, batch=size)
    cursors = [Cursor(epoch=0, position=k * size, samples=k * size, step=k) for k in range(steps)]
    if total is None:
        return [c for c in cursors if reader.batch(epoch=0, position=c.position, size=size)] or cursors[:1]
    full_batches = [cursor for cursor in cursors if cursor.position + size <= total]
    remainder = total % size
    if remainder and not prepared_job.settings.data.drop_last:
        start = total - remainder
        last = Cursor(epoch=0, position=start, samples=start, step=start // size)
        full_batches = [*full_batches[: max(steps - 1, 1)], last] if full_batches else [last]
    return full_batches


def _steps_to_compare(prepared_job: PreparedJob, world: World, steps: int, single_result: RungResult) -> list[Cursor]:
    """Return cursors of the steps to compare, without the last one if one process can't run its batch.

    Usually this is the short final batch of an epoch.

    Raises:
        JobError: the run would reach this batch.
    """
    cursors = select_steps(prepared_job, steps)
    last, problem = cursors[-1], ""
    if world.is_main:
        try:
            build_reference(prepared_job, None).compute_gradient(
                RunPosition(steps_done=last.step, epoch=last.epoch, batch_start=last.position)
            )
        except Exception as error:
            problem = _first_line(error)
    problem = world.share_json(problem)
    if not problem or len(cursors) == 1:
        return cursors
    num_steps = prepared_job.settings.train.steps
    if num_steps is None or num_steps > last.step:
        raise JobError(
            f"step {last.step + 1}, the last that would be compared, can't be run, not even in one process: {problem}",
            cause="in a short last batch, a layer (BatchNorm), the loss or the collation may need more samples",
            hint="--data.drop_last true, or a global_batch_size that leaves more samples over",
        )
    single_result.detail += (
        f" Step {last.step + 1} was left out: one process can't run it, and train.steps={num_steps} does not reach it."
    )
    return cursors[:-1]


def _find_loss_scale(prepared_job: PreparedJob, world: World) -> float:
    """Return the fp16 loss scale. It is reduced if the first step of one process overflows."""
    if prepared_job.settings.train.precision != "fp16":
        return LOSS_SCALE
    scale = LOSS_SCALE
    if world.is_main:
        while scale > _MIN_LOSS_SCALE and not _has_finite_gradient(
            build_reference(prepared_job, None, loss_scale=scale)
        ):
            scale /= 2.0
        scale = LOSS_SCALE if scale in (LOSS_SCALE, _MIN_LOSS_SCALE) else scale / _LOSS_SCALE_HEADROOM
    shared_scale: float = world.share_json(scale)
    return shared_scale


def _has_finite_gradient(reference: Reference) -> bool:
    try:
        return all(bool(torch.isfinite(value).all()) for value in reference.compute_gradient(_START).total.values())
    except Exception:  # the first rung reports it
        return True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _run_rung(name: str, rules_out: str, run: Callable[[], RungResult]) -> Rung:
    start_time = time.perf_counter()
    rung_result = run()
    return Rung(name=name, rules_out=rules_out, result=rung_result, seconds=time.perf_counter() - start_time)


def _progress_printer(world: World, label: str) -> Callable[[str], None]:
    """Return a function that prints progress on rank 0."""

    def print_progress(text: str) -> None:
        if world.is_main:
            output.print_line(f"verify: {label}: {text}")

    return print_progress


def _run_first_rung(prepared_job: PreparedJob, world: World) -> RungResult:
    rung_result = RungResult()
    _progress_printer(world, "one process")("the same batch twice, then in halves")
    if world.is_main:
        rung_result = verify_single_process(lambda: build_reference(prepared_job, None))
    shared_result: RungResult = RungResult(**world.share_json(vars(rung_result)))
    return shared_result


def _select_precisions(
    prepared_job: PreparedJob, world: World, single_result: RungResult
) -> list[tuple[torch.dtype | None, str]]:
    """Return the precisions to compare in, as (type, name): float64 if possible, then the job's own (None)."""
    problem = ""
    if world.is_main:
        try:
            with keep_float64():
                build_reference(prepared_job, torch.float64).compute_gradient(_START)
        except Exception as error:
            problem = _first_line(error)
    problem = world.share_json(problem)
    job_precision: tuple[torch.dtype | None, str] = (None, prepared_job.settings.train.precision)
    if problem:
        single_result.detail += f" float64 was left out: the model does not support it ({problem})."
        return [job_precision]
    return [(torch.float64, "float64"), job_precision]


def _run_lockstep(
    prepared_job: PreparedJob,
    world: World,
    dtype: torch.dtype | None,
    name: str,
    cursors: Sequence[Cursor],
    loss_scale: float,
) -> RungResult:
    """Compare each of these steps with one process. Every step starts from equal weights."""
    with keep_float64(active=dtype is torch.float64):
        setup = build_in_precision(prepared_job, world, dtype, loss_scale=loss_scale)
        reference = build_reference(prepared_job, dtype, loss_scale=loss_scale) if world.is_main else None
        lockstep = LockstepComparison(setup=setup, reference=reference, report_progress=_progress_printer(world, name))
        with _without_unmatched_dropout(prepared_job, setup, reference) as note:
            lockstep.rung_result.detail = " ".join([note, *(f"{text}." for text in setup.notes)]).strip()
            lockstep.rung_result.has_dropout_off = bool(note)
            result = lockstep.run(cursors)
        setup.close()
        return result


@contextmanager
def _without_unmatched_dropout(
    prepared_job: PreparedJob, setup: TrainingSetup, reference: Reference | None
) -> Iterator[str]:
    """Disable dropout where one process cannot draw the same random numbers, and yield a note about it."""
    if prepared_job.settings.train.buffers != "sync_bn" or not has_dropout(setup.model):
        yield ""
        return
    with without_dropout([*setup.models] if reference is None else [*setup.models, reference.model]):
        yield "Dropout is off here: under sync_bn one process can't draw each replica's random numbers."


def _run_independently(
    prepared_job: PreparedJob,
    world: World,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    drift: WeightDrift | None = None,
    loss_scale: float = LOSS_SCALE,
) -> RungResult:
    """Train for `steps` steps on the ranks, then in one process, and compare the results.

    For a parameter server, the process replays the record of the ranks' updates; otherwise it trains on its own.
    """
    with keep_float64(active=dtype is torch.float64):
        setup = build_in_precision(prepared_job, world, dtype, loss_scale=loss_scale)
        reference = (
            build_reference(prepared_job, dtype, constructor=select_reference(setup), loss_scale=loss_scale)
            if world.is_main
            else None
        )
        with _without_unmatched_dropout(prepared_job, setup, reference):
            report_progress = _progress_printer(world, "free running")
            result = rule_reference(prepared_job.plan).compare(
                setup, reference=reference, steps=steps, report_progress=report_progress, drift=drift
            )
        setup.close()
        return result
