"""The session of one rank: it is built from a task, contains the training loop, and closes its resources."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint
from paceline.checkpoint.files.remote_store import remote_url
from paceline.checkpoint.files.superseded_checkpoints import move_superseded
from paceline.checkpoint.lr_schedule_state import refuse_short_schedules
from paceline.checkpoint.resume_checks import describe_changes
from paceline.comm.process_group import World
from paceline.config.job_reference import source_name
from paceline.console.formatting import plural
from paceline.data.dataset_properties import DatasetProperties
from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.errors import raise_all
from paceline.events import Event, EventBus, Note, RunEnded, RunStarted
from paceline.faults import parse_faults, refuse_idle_faults
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.launch.agent.rank_activity import activity_reporter
from paceline.launch.agent.shared_status import open_heartbeat
from paceline.launch.agent.signals import stop_flag
from paceline.launch.joined_rank import joined_rank
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.planner.layout.update_rule_checks import rule_planning
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.reporting.sinks.sink_registry import CURVE_SINKS, make_sinks
from paceline.run_folder.run_folder import RunFolder, run_of_checkpoint
from paceline.step.update_rules import step_rule
from paceline.torch_internals.flight_recorder import unfinished_collectives
from paceline.trainer.checks.evaluation_checks import (
    data_length_notes,
    early_stop_notes,
    evaluation_notes,
    finished_note,
    last_batch_notes,
    refuse_large_batch,
)
from paceline.trainer.checks.lr_schedule_units import schedules_in_epochs
from paceline.trainer.diagnostics.forecast_check import ForecastCheck
from paceline.trainer.diagnostics.forecast_lookup import find_forecast, is_forecast_supported
from paceline.trainer.diagnostics.memory_report import MemoryBaseline, explain_out_of_memory
from paceline.trainer.diagnostics.replica_check import ReplicaChecks
from paceline.trainer.fault_injection import open_faults
from paceline.trainer.loop import Loop
from paceline.trainer.saving.checkpointer import Checkpointer, open_checkpointer
from paceline.trainer.saving.final_weights import best_weights_notes, write_final_weights
from paceline.trainer.saving.grace_period import watch_grace_period
from paceline.trainer.saving.memory.memory_tier import open_memory_tier
from paceline.trainer.saving.remote_start import RunStart, choose_start, finish_uploads
from paceline.trainer.saving.remote_tier import RemoteTier
from paceline.trainer.saving.resume_run import (
    find_checkpoint_of_restart,
    read_saved_identity,
    restart_events,
    restore,
    restore_progress,
)
from paceline.trainer.saving.rollback import open_rollback
from paceline.trainer.saving.run_identity import run_identity
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.duration import Length, format_interval, requested_length
from paceline.trainer.setup.job_data import build_loader, build_partition, read_data_properties
from paceline.trainer.setup.prepare import PreparedJob, begin_attempt, with_saved_microbatches
from paceline.trainer.setup.run_records import record_new_modules, write_run_records


class Session:
    """The resources of one rank from joining the process group until leaving it."""

    def __init__(
        self,
        *,
        prepared_job: PreparedJob,
        world: World,
        run: RunFolder,
        setup: TrainingSetup,
        loader: BatchLoader,
        event_bus: EventBus,
        loop: Loop,
        start_time: float,
        remote_tier: RemoteTier | None = None,
    ) -> None:
        self.prepared_job = prepared_job
        self.world = world
        self.run = run
        self.setup = setup
        self.event_bus = event_bus
        self.loop = loop
        self._loader = loader
        self._start_time = start_time
        self._remote_tier = remote_tier

    def finish(self) -> int:
        """Save, consolidate the final weights, and return the exit code."""
        exit_code = int(self.loop.finish())
        self.loop.forecast_check.store_ratios()
        if exit_code == 0 and self.prepared_job.settings.checkpoint.consolidated != "none":
            line = write_final_weights(self.setup, self.run.path, step=self.loop.cursor.step)
            for text in (line, *best_weights_notes(self.setup.job, self.run, step=self.loop.cursor.step)):
                self.event_bus.emit(Note(text=text))
        if self.world.is_main:
            record_new_modules(self.run)
        if exit_code == 0 and self.prepared_job.task.faults:
            self.loop.refuse_missed_faults()
        status = "done" if exit_code == 0 else "stopped"
        if remote_url(self.prepared_job.settings):
            exit_code = finish_uploads(
                self._remote_tier, self.setup, exit_code=exit_code, report_finished=self.loop.report_finished
            )
        seconds = time.monotonic() - self._start_time
        self.event_bus.emit(RunEnded(status=status, step=self.loop.cursor.step, exit_code=exit_code, seconds=seconds))
        return exit_code

    def close(self) -> None:
        """Close the loader, the event bus, the model and the process group."""
        self.loop.report_finished()
        if self._remote_tier is not None:
            self._remote_tier.close()
        self._loader.close()
        self.event_bus.close()
        self.setup.close()
        self.world.close()


def open_session(prepared_job: PreparedJob, *, world: World, on_eval_argument: Any = None) -> Session:
    """Build model, data, loop and sinks of a task, load its checkpoint, and emit `RunStarted`. Every rank calls this.

    Raises:
        PacelineError: the request is not possible.
    """
    start_time = time.monotonic()
    start = choose_start(prepared_job, world)
    run = RunFolder(Path(start.folder))
    prepared_job = replace(prepared_job, task=begin_attempt(prepared_job.task, run=run, number=start.attempt))
    requested = Path(start.resume or "")
    requested_checkpoint = requested if requested.name.startswith("step-") else None
    if prepared_job.task.verb == "evaluate":  # use the run's microbatches, so that sums do not depend on the layout
        prepared_job = with_saved_microbatches(prepared_job, folder=run.path, world=world)
    if start.resume is not None:
        original_run = run_of_checkpoint(requested_checkpoint) if requested_checkpoint is not None else run
        prepared_job = with_saved_microbatches(prepared_job, folder=original_run.path, world=world)
    activity_reporter.traffic, activity_reporter.list_unfinished = world.traffic, unfinished_collectives
    memory_baseline = MemoryBaseline.measure()
    with explain_out_of_memory(None, memory_baseline):
        setup = build_training_setup(
            job=prepared_job.job, settings=prepared_job.settings, plan=prepared_job.plan, world=world
        )
    session_builder = _SessionBuilder(
        prepared_job=prepared_job,
        world=world,
        run=run,
        setup=setup,
        start=start,
        requested_checkpoint=requested_checkpoint,
        memory_baseline=memory_baseline.after_build(),
    )
    return session_builder.build(on_eval_argument, start_time=start_time)


@dataclass(frozen=True, kw_only=True)
class _SessionBuilder:
    """The inputs from which a `Session` is built. `requested_checkpoint` is the checkpoint that the user named."""

    prepared_job: PreparedJob
    world: World
    run: RunFolder
    setup: TrainingSetup
    start: RunStart
    requested_checkpoint: Path | None
    memory_baseline: MemoryBaseline

    def build(self, on_eval_argument: Any, *, start_time: float) -> Session:
        """Load the checkpoint, build the session, and announce the run."""
        prepared_job = self.prepared_job
        forecast = self._find_forecast()
        loaded, events = self._open_checkpoint()
        data_properties = read_data_properties(self.setup.data.train, self.world, seed=prepared_job.settings.seed)
        identity = run_identity(self.setup, **_data_identity(data_properties), job=source_name(prepared_job.task.job))
        cursor = Cursor()
        if loaded is not None:
            cursor = restore(loaded, setup=self.setup, identity=identity, allow=prepared_job.task.allow)
            events += self._set_aside_later_checkpoints(loaded)
            changes = describe_changes(loaded.state.get("settings"), prepared_job.settings)
            events += [Note(text=text, level="warning") for text in changes]
        loader = self._make_loader(cursor, data_properties)
        bus = self._make_event_bus()
        remote_tier = self.start.open_tier(prepared_job.settings, self.run, bus)
        checkpointer = open_checkpointer(
            self.setup,
            prepared_job.task,
            folder=self.run.checkpoints,
            identity=identity,
            resumed_checkpoint=loaded,
            remote_tier=remote_tier,
        )
        forecast_check = ForecastCheck(
            forecast=forecast, setup=self.setup, memory_baseline=self.memory_baseline, event_bus=bus
        )
        loop = self._make_loop(
            cursor,
            loaded,
            on_eval_argument,
            loader=loader,
            event_bus=bus,
            checkpointer=checkpointer,
            forecast_check=forecast_check,
        )
        session = Session(
            prepared_job=prepared_job,
            world=self.world,
            run=self.run,
            setup=self.setup,
            loader=loader,
            event_bus=bus,
            loop=loop,
            start_time=start_time,
            remote_tier=remote_tier,
        )
        if prepared_job.task.verb == "train":
            self.setup.step.replica.contract.request_sum_check()
            refuse_short_schedules(self.setup.update.lr_schedulers, total_steps=loop.total_steps)
            refuse_large_batch(self.setup.plan, num_samples=loader.num_samples)
            events += self._schedule_notes(loader, loop) if not cursor.step else []
        events = [*self.start.events, *events]
        self._announce(cursor, loaded, events, loader=loader, loop=loop, forecast=forecast)
        if remote_tier is not None:
            remote_tier.start()
        return session

    def _schedule_notes(self, loader: BatchLoader, loop: Loop) -> list[Note]:
        batch, samples = self.prepared_job.plan.global_batch_size, loader.num_samples
        drop_last = self.prepared_job.settings.data.drop_last
        epoch_steps = None if samples is None else max(1, samples // batch if drop_last else -(-samples // batch))
        warnings = schedules_in_epochs(
            self.setup.update.lr_schedulers, total_steps=loop.total_steps, epoch_steps=epoch_steps
        )
        return [Note(text=text, level="warning") for text in warnings]

    def _find_forecast(self) -> LayoutForecast | None:
        """Return the forecast that rank 0 finds for this run, shared with all ranks."""
        if not is_forecast_supported(self.prepared_job):
            return None
        forecast = None
        if self.world.is_main:
            forecast = find_forecast(self.prepared_job, folder=self.run.path, count_parameters=self._count_parameters)
        shared_forecast = self.world.share_json(None if forecast is None else forecast.as_json())
        return None if shared_forecast is None else LayoutForecast(**shared_forecast)

    def _count_parameters(self) -> int:
        """Return the number of trainable parameters on all ranks together."""
        shards = self.setup.optim_shards
        return sum(math.prod(shards.shard_specs(name)[0].shape) for name in shards.names)

    def _open_checkpoint(self) -> tuple[OpenCheckpoint | None, list[Event]]:
        if self.start.resume is None:
            return None, []
        return find_checkpoint_of_restart(
            self.prepared_job.task,
            self.run.checkpoints,
            requested=self.requested_checkpoint,
            world=self.world,
            download=self.start.download,
            share_choice=self.start.share_choice(self.setup),
        )

    def _set_aside_later_checkpoints(self, loaded: OpenCheckpoint) -> list[Event]:
        """Move newer checkpoints to another folder, if this run resumes from an older one."""
        is_older_checkpoint = self.requested_checkpoint is not None and loaded.belongs_to(self.run.checkpoints)
        if not (is_older_checkpoint and self.world.is_main and self.prepared_job.task.verb == "train"):
            return []
        with convert_to_save_error("later checkpoints,", self.run.checkpoints):
            folder = move_superseded(self.run.checkpoints, start=loaded.path)
        return [] if folder is None else [Note(text=f"checkpoints after {loaded.path.name} were set aside in {folder}")]

    def _make_loader(self, cursor: Cursor, data_properties: DatasetProperties | None) -> BatchLoader:
        plan, settings = self.prepared_job.plan, self.prepared_job.settings
        return build_loader(
            self.setup.data,
            settings,
            partition=build_partition(
                plan, settings, self.setup.worlds.data, reads_samples=step_rule(plan.update_rule).traits.reads_samples
            ),
            cursor=cursor,
            sample_seeds=settings.data.sample_seeds,
            pin_memory=self.world.device.type == "cuda",
            shards=settings.data.shards,
            gather_json=self.world.gather_json if self.world.world_size > 1 else None,
            properties=data_properties,
        )

    def _make_event_bus(self) -> EventBus:
        """Return the bus that sends events to the run's sinks. Only rank 0 has sinks."""
        if not self.world.is_main:
            return EventBus()
        names = self.prepared_job.settings.watch.to
        if self.prepared_job.task.verb == "evaluate":
            training_sinks = {*CURVE_SINKS, "jsonl"}
            names = tuple(name for name in names if name not in training_sinks)
        sinks, skipped_notes = make_sinks(names, run=self.run)
        event_bus = EventBus(sinks)
        watch_grace_period(event_bus, self.prepared_job.settings)
        for note in skipped_notes:
            event_bus.emit(Note(text=note))
        return event_bus

    def _make_loop(
        self,
        cursor: Cursor,
        loaded: OpenCheckpoint | None,
        on_eval_argument: Any,
        *,
        loader: BatchLoader,
        event_bus: EventBus,
        checkpointer: Checkpointer,
        forecast_check: ForecastCheck,
    ) -> Loop:
        settings, task = self.prepared_job.settings, self.prepared_job.task
        if loaded is not None:
            loader_state = loaded.state["feed"]  # "feed" is the key of the loader's state in a checkpoint
            loader.restore({k: v for k, v in loader_state.items() if k != "order" or "order" not in task.allow})
        length = requested_length(settings, epoch_samples=loader.num_samples)
        faults = parse_faults(task.faults)
        raise_all(refuse_idle_faults(faults, ranks=task.requested_ranks or task.ranks, steps=self._total_steps(length)))
        return Loop(
            setup=self.setup,
            loader=loader,
            checkpointer=checkpointer,
            memory_tier=open_memory_tier(self.setup, checkpointer, start_step=cursor.step),
            event_bus=event_bus,
            heartbeat=open_heartbeat(self.world.rank, settings, start_step=cursor.step, folder=joined_rank.pages),
            faults=open_faults(faults, task, rank=self.world.rank),
            stop=stop_flag,
            length=length,
            cursor=cursor,
            progress=restore_progress(self.setup, loaded),
            memory_baseline=self.memory_baseline,
            forecast_check=forecast_check,
            on_eval_argument=on_eval_argument,
            replica_checks=ReplicaChecks(self.setup, start_step=cursor.step, previous_failure=task.restart),
            rollback=open_rollback(self.setup, self.run),
        )

    def _total_steps(self, length: Length) -> int | None:
        batch, drop_last = self.prepared_job.plan.global_batch_size, self.prepared_job.settings.data.drop_last
        return length.total_steps(batch=batch, drop_last=drop_last)

    def _announce(
        self,
        cursor: Cursor,
        loaded: OpenCheckpoint | None,
        events: Sequence[Event],
        *,
        loader: BatchLoader,
        loop: Loop,
        forecast: LayoutForecast | None,
    ) -> None:
        """Write the records of the run and emit `RunStarted`, on rank 0. An evaluation changes no records."""
        if not self.world.is_main or self.prepared_job.task.verb == "evaluate":
            return
        task, plan = self.prepared_job.task, self.prepared_job.plan
        write_run_records(self.run, self.prepared_job, forecast=forecast)
        events = [*restart_events(task, loaded, resumed_step=cursor.step), *events]
        for event in events:
            loop.event_bus.emit(event)
        loop.event_bus.emit(
            RunStarted(
                run_id=str(self.run.path),
                job=task.job,
                layout=plan.layout,
                ranks=plan.processes,
                attempt=task.attempt,
                resumed_from=cursor.step if loaded else None,
                total_steps=loop.total_steps,
                banner=self._banner(cursor, loaded, loader=loader, loop=loop),
                is_restart=task.restart is not None,
            )
        )

    def _banner(
        self, cursor: Cursor, loaded: OpenCheckpoint | None, *, loader: BatchLoader, loop: Loop
    ) -> tuple[str, ...]:
        """Return the first lines that the run prints."""
        settings = self.prepared_job.settings
        parameters = self._count_parameters()
        lines = [
            f"run: {self.run.path}",
            f"model: {plural(parameters, 'trainable parameter')}",
            *self.prepared_job.plan.notes,
        ]
        samples = loader.num_samples
        lines += [] if samples is None else [f"data: {plural(samples, 'sample')} per epoch"]
        lines += [*loader.notes, *self.setup.notes]
        intervals = f"save {format_interval(loop.save_every, total=loop.total_steps)}"
        if self.prepared_job.job.eval_data is not None:
            intervals = f"evaluate {format_interval(loop.eval_every, total=loop.total_steps)}, {intervals}"
        lines.append(f"steps: {loop.total_steps or 'until the data ends'}, {intervals}")
        rule = self.prepared_job.plan.update_rule
        lines += rule_planning(rule).length_notes(rule, total_steps=loop.total_steps)
        if url := remote_url(settings):
            lines.append(f"remote: each checkpoint is also copied to {url}")
        lines.append(f"precision: {settings.train.precision}{', exact' if settings.train.exact else ''}")
        if any(norms_with_statistics(self.setup.model)):
            lines.append(step_rule(rule).buffer_note(settings.train.buffers))
        micro, is_resumed = self.prepared_job.plan.micro_batch_size, self.start.resume is not None
        lines += evaluation_notes(
            self.prepared_job.job, settings, model=self.setup.model, micro_batch_size=micro, is_resumed=is_resumed
        )
        lines += last_batch_notes(
            self.prepared_job.plan,
            settings,
            self.setup.model,
            samples=samples,
            total_steps=loop.total_steps,
            is_resumed=is_resumed,
        )
        scale = settings.train.lr_scaling
        lines.append(f"lr: {loop.setup.update.optimizers[0].param_groups[0]['lr']:.3g} (scaling: {scale})")
        if loaded is None and self.start.resume is not None:
            lines.append("resumed: nothing had been saved, so the run starts at its first step")
        if loaded is not None:
            is_same_run = loaded.belongs_to(self.run.checkpoints)
            lines.append(
                f"resumed: {loaded.path.name if is_same_run else loaded.path}, "
                f"{plural(cursor.samples, 'sample')} consumed"
            )
            lines += loop.rule_changes
            saved_num_samples = read_saved_identity(loaded)["data"]["num_samples"]
            lines += data_length_notes(saved_num_samples, samples, cursor=cursor, total_steps=loop.total_steps)
            early_stop_lines = list(early_stop_notes(self.prepared_job.job, loop.progress, step=cursor.step))
            is_finished = loop.is_over() and not loop.progress.is_evaluation_pending
            lines += early_stop_lines or (
                [finished_note(settings, step=cursor.step, total=loop.total_steps)] if is_finished else []
            )
        return tuple(lines)


def _data_identity(data_properties: DatasetProperties | None) -> dict[str, Any]:
    """Return the data properties in the form that a checkpoint stores."""
    if data_properties is None:
        return {"num_samples": None, "data": "stream"}
    return {"num_samples": data_properties.num_samples, "data": f"{data_properties.fingerprint:08x}"}
