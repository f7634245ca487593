"""The session of one rank, which builds a ready-to-run loop from a task, and closes it."""

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import BEST, OpenCheckpoint, pointed_checkpoint, step_of
from paceline.checkpoint.files.superseded_checkpoints import set_aside
from paceline.checkpoint.lr_schedule_state import refuse_short
from paceline.checkpoint.resume_checks import note_changes
from paceline.comm.process_group import World
from paceline.config.job_reference import file_name
from paceline.config.loading import as_toml
from paceline.config.secret_settings import holds_secret
from paceline.console.formatting import plural
from paceline.data.dataset_properties import DatasetProperties, find_facts, looked_at, read_again, refuse_other_data
from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.errors import raise_all
from paceline.events import Event, EventBus, Note, RunEnded, RunStarted
from paceline.faults import Faults, parse_faults, refuse_idle_faults
from paceline.filesystem.atomic_files import read_json, write_json, write_text
from paceline.filesystem.disk_full import as_checkpoint_error
from paceline.launch.agent.shared_status import Pulse
from paceline.launch.agent.signals import stop_flag
from paceline.launch.inherited_environment import attempt_folder
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.planner.layout.update_rule_checks import rule_planning
from paceline.planner.search.layout_with_forecast import FallbackLayout
from paceline.profiling.environment import environment, loaded_modules
from paceline.reporting.sinks.sink_registry import CURVES, make_sinks
from paceline.run_folder.plan_file import write_decided
from paceline.run_folder.run_folder import RunFolder, run_of
from paceline.step.update_rules import step_rule
from paceline.trainer.checkpointer import (
    Checkpointer,
    began_as,
    checkpoint_to_resume,
    find_checkpoint,
    restore,
    run_identity,
    write_final,
)
from paceline.trainer.checks.evaluation_checks import (
    asked_of,
    changed_length,
    evaluation_notes,
    last_batch_notes,
    nothing_left,
    refuse_large_batch,
    stopped_early,
)
from paceline.trainer.checks.lr_schedule_units import schedules_in_epochs
from paceline.trainer.diagnostics.forecast_check import ForecastCheck
from paceline.trainer.diagnostics.forecast_lookup import can_be_foretold, find_forecast
from paceline.trainer.diagnostics.memory_report import MemoryBaseline, naming_memory
from paceline.trainer.loop import Loop
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.duration import Length, Progress, format_interval, length_of
from paceline.trainer.setup.job_data import cut_for, feed_for
from paceline.trainer.setup.prepare import PreparedJob, as_first_cut


class Session:
    """The resources of one rank from joining the process group until leaving it."""

    def __init__(
        self,
        *,
        ready: PreparedJob,
        world: World,
        run: RunFolder,
        built: TrainingSetup,
        feed: BatchLoader,
        event_bus: EventBus,
        loop: Loop,
        began: float,
    ) -> None:
        self.ready = ready
        self.world = world
        self.run = run
        self.built = built
        self.event_bus = event_bus
        self.loop = loop
        self._feed = feed
        self._began = began

    def finish(self) -> int:
        """Save, consolidate the final weights, and return the exit code."""
        code = int(self.loop.finish())
        self.loop.forecast_check.remember()
        if code == 0 and self.ready.settings.checkpoint.consolidated != "none":
            line = write_final(self.built, self.run.path, step=self.loop.cursor.step)
            self.event_bus.emit(Note(text=line))
            self._tell_best()
        if self.world.is_main:
            self._add_late_modules()
        status = "done" if code == 0 else "stopped"
        seconds = time.monotonic() - self._began
        self.event_bus.emit(RunEnded(status=status, step=self.loop.cursor.step, exit_code=code, seconds=seconds))
        return code

    def _tell_best(self) -> None:
        """Tell the user how to get the best step's weights, if the best step is not the last one."""
        best = pointed_checkpoint(self.run.checkpoints, BEST)
        asked = self.ready.job.best is not None or self.ready.job.early_stopping is not None
        if asked and best is not None and step_of(best) != self.loop.cursor.step:
            text = (
                f"consolidated/ has the weights of step {self.loop.cursor.step}, the last one; the "
                "best weights are from step "
                f"{step_of(best)}: paceline ckpt consolidate {self.run.path} --best --to best"
            )
            self.event_bus.emit(Note(text=text))

    def _add_late_modules(self) -> None:
        """Add modules that the job's loss or model imported after the start to the code recorded in `env.json`."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            env = read_json(self.run.path / "env.json")
            known = env["job"]["modules"]
            late = {name: digest for name, digest in loaded_modules().items() if name not in known}
            if late:
                write_json(self.run.path / "env.json", {**env, "job": {**env["job"], "late_modules": late}})

    def close(self) -> None:
        """Close the data feed, the event stream, the model and the process group."""
        self.loop.beat_over()
        self._feed.close()
        self.event_bus.close()
        self.built.close()
        self.world.close()


def open_session(ready: PreparedJob, *, world: World, target: Any = None) -> Session:
    """Build model, data, loop and sinks of a task, load its checkpoint, and emit `RunStarted`. Every rank calls this.

    Raises:
        PacelineError: the request is not possible.
    """
    began = time.monotonic()
    folder, resume = world.share_json([ready.task.run, checkpoint_to_resume(ready.task)])
    run = RunFolder(Path(folder))
    requested = Path(resume or "")
    requested_checkpoint = requested if requested.name.startswith("step-") else None
    if ready.task.verb == "evaluate":  # use the run's microbatches, so that sums do not depend on the layout
        ready = as_first_cut(ready, folder=run.path, world=world)
    if resume is not None:
        original_run = run_of(requested_checkpoint) if requested_checkpoint is not None else run
        ready = as_first_cut(ready, folder=original_run.path, world=world)
    before = MemoryBaseline.now()
    with naming_memory(None, before):
        built = build_training_setup(job=ready.job, settings=ready.settings, plan=ready.plan, world=world)
    opening = _Opening(
        ready=ready,
        world=world,
        run=run,
        built=built,
        resume=resume,
        requested_checkpoint=requested_checkpoint,
        before=before.built(),
    )
    return opening.session(target, began=began)


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """The inputs from which a `Session` is built. `requested_checkpoint` is the checkpoint that the user named."""

    ready: PreparedJob
    world: World
    run: RunFolder
    built: TrainingSetup
    resume: str | None
    requested_checkpoint: Path | None
    before: MemoryBaseline

    def session(self, target: Any, *, began: float) -> Session:
        """Load the checkpoint, build the session, and announce the run."""
        ready = self.ready
        forecast = self._find_forecast()
        loaded, events = self._open_checkpoint()
        facts = self._look_at_data()
        identity = run_identity(self.built, **_told(facts), job=file_name(ready.task.job))
        cursor = Cursor()
        if loaded is not None:
            cursor = restore(loaded, built=self.built, identity=identity, allow=ready.task.allow)
            events += self._set_aside_later(loaded)
            changes = note_changes(loaded.state.get("settings"), ready.settings)
            events += [Note(text=text, level="warning") for text in changes]
        feed = self._make_feed(cursor, facts)
        event_bus = self._make_event_bus()
        saver = Checkpointer(
            built=self.built,
            folder=self.run.checkpoints,
            identity=identity,
            names=[member.name for member in self.built.named],
            begun_from=loaded,
        )
        check = ForecastCheck(forecast=forecast, built=self.built, before=self.before, event_bus=event_bus)
        loop = self._make_loop(cursor, loaded, target, feed=feed, event_bus=event_bus, saver=saver, check=check)
        session = Session(
            ready=ready,
            world=self.world,
            run=self.run,
            built=self.built,
            feed=feed,
            event_bus=event_bus,
            loop=loop,
            began=began,
        )
        if ready.task.verb == "train":
            self.built.step.replica.contract.ask_sum()
            refuse_short(self.built.update.schedules, total_steps=loop.total_steps)
            refuse_large_batch(self.built.plan, num_samples=feed.num_samples)
            events += self._notes_of_schedules(feed, loop) if not cursor.step else []
        self._announce(cursor, loaded, events, feed=feed, loop=loop, forecast=forecast)
        return session

    def _notes_of_schedules(self, feed: BatchLoader, loop: Loop) -> list[Note]:
        batch, samples = self.ready.plan.global_batch_size, feed.num_samples
        drop_last = self.ready.settings.data.drop_last
        epoch_steps = None if samples is None else max(1, samples // batch if drop_last else -(-samples // batch))
        schedules, total = self.built.update.schedules, loop.total_steps
        found = schedules_in_epochs(schedules, total_steps=total, epoch_steps=epoch_steps)
        return [Note(text=text, level="warning") for text in found]

    def _find_forecast(self) -> FallbackLayout | None:
        """Return the forecast that rank 0 finds for this run, shared with all ranks."""
        if not can_be_foretold(self.ready):
            return None
        found = None
        if self.world.is_main:
            found = find_forecast(self.ready, folder=self.run.path, parameters=self._parameters)
        shared = self.world.share_json(None if found is None else found.as_json())
        return None if shared is None else FallbackLayout(**shared)

    def _parameters(self) -> int:
        """Return the number of trainable parameters on all ranks together."""
        kept = self.built.kept
        return sum(math.prod(kept.parts(name)[0].shape) for name in kept.names)

    def _open_checkpoint(self) -> tuple[OpenCheckpoint | None, list[Event]]:
        if self.resume is None:
            return None, []
        return find_checkpoint(self.run.checkpoints, asked=self.requested_checkpoint, world=self.world)

    def _set_aside_later(self, loaded: OpenCheckpoint) -> list[Event]:
        """Move aside the checkpoints that are newer than the one from which this run resumes."""
        goes_back = self.requested_checkpoint is not None and loaded.is_in(self.run.checkpoints)
        if not (goes_back and self.world.is_main and self.ready.task.verb == "train"):
            return []
        with as_checkpoint_error("later checkpoints,", self.run.checkpoints):
            aside = set_aside(self.run.checkpoints, start=loaded.path)
        return [] if aside is None else [Note(text=f"checkpoints after {loaded.path.name} were set aside in {aside}")]

    def _look_at_data(self) -> DatasetProperties | None:
        """Return the properties of indexed data, after a check that they are equal on every rank; None for a stream."""
        source, seed = self.built.data.train, self.ready.settings.seed
        if not source.is_indexed:
            return None
        facts = find_facts(source, seed=seed)
        facts.refuse_problem()
        told = self.world.gather_json([facts.num_samples, facts.fingerprint])
        samples = looked_at(facts.num_samples)

        def is_same() -> bool:
            return all(self.world.gather_json(read_again(source, samples=samples, epoch=0, seed=seed)))

        lengths, checksums = [one[0] for one in told], [one[1] for one in told]
        by_rank = dict(enumerate(lengths)), dict(enumerate(checksums))
        refuse_other_data(*by_rank, samples=samples, name="train_data", is_same=is_same)
        return facts

    def _make_feed(self, cursor: Cursor, facts: DatasetProperties | None) -> BatchLoader:
        plan, settings = self.ready.plan, self.ready.settings
        return feed_for(
            self.built.data,
            settings,
            cut=cut_for(plan, settings, self.built.worlds.data, reads=step_rule(plan.rule).traits.reads_samples),
            cursor=cursor,
            sample_seeds=settings.data.sample_seeds,
            pin_memory=self.world.device.type == "cuda",
            shards=settings.data.shards,
            agree=self.world.gather_json if self.world.world_size > 1 else None,
            facts=facts,
        )

    def _make_event_bus(self) -> EventBus:
        if not self.world.is_main:
            return EventBus()
        to = self.ready.settings.watch.to
        if self.ready.task.verb == "evaluate":
            to = tuple(name for name in to if name not in {*CURVES, "jsonl"})  # these sinks record only training
        sinks, left_out = make_sinks(to, run=self.run)
        event_bus = EventBus(sinks)
        for note in left_out:
            event_bus.emit(Note(text=note))
        return event_bus

    def _make_loop(
        self,
        cursor: Cursor,
        loaded: OpenCheckpoint | None,
        target: Any,
        *,
        feed: BatchLoader,
        event_bus: EventBus,
        saver: Checkpointer,
        check: ForecastCheck,
    ) -> Loop:
        settings, task = self.ready.settings, self.ready.task
        if loaded is not None:
            place = loaded.state["feed"]
            feed.restore({k: v for k, v in place.items() if k != "order" or "order" not in task.allow})
        extra = loaded.state.get("extra", {}) if loaded else {}
        length = length_of(settings, epoch_samples=feed.num_samples)
        faults = parse_faults(task.faults)
        raise_all(refuse_idle_faults(faults, ranks=task.ranks, steps=self._total_steps(length)))
        return Loop(
            built=self.built,
            feed=feed,
            saver=saver,
            event_bus=event_bus,
            pulse=self._make_pulse(),
            faults=Faults(faults, rank=self.world.rank, attempt=task.attempt),
            stop=stop_flag,
            length=length,
            cursor=cursor,
            progress=Progress.from_json(extra),
            before=self.before,
            forecast_check=check,
            on_eval_target=target,
        )

    def _total_steps(self, length: Length) -> int | None:
        batch, drop_last = self.ready.plan.global_batch_size, self.ready.settings.data.drop_last
        return length.total_steps(batch=batch, drop_last=drop_last)

    def _make_pulse(self) -> Pulse | None:
        folder = attempt_folder(os.environ)
        patience = self.ready.settings.train.timeout_seconds
        return Pulse(folder / f"pulse-{self.world.rank}", patience=patience) if folder else None

    def _announce(
        self,
        cursor: Cursor,
        loaded: OpenCheckpoint | None,
        events: Sequence[Event],
        *,
        feed: BatchLoader,
        loop: Loop,
        forecast: FallbackLayout | None,
    ) -> None:
        if not self.world.is_main or self.ready.task.verb == "evaluate":  # an evaluation changes no records
            return
        task, plan = self.ready.task, self.ready.plan
        private = holds_secret(self.ready.asked.values)
        write_text(self.run.path / "config.toml", as_toml(self.ready.asked), private=private)
        write_json(self.run.path / "job.json", asked_of(self.ready.job))
        write_decided(self.run.path, {**plan.as_json(), **self._planned(forecast)})
        write_json(self.run.path / "env.json", environment(task.job))
        write_json(self.run.task, replace(task, job_handle=None).as_json(), private=private)
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
                banner=self._banner(cursor, loaded, feed=feed, loop=loop),
            )
        )

    def _planned(self, forecast: FallbackLayout | None) -> dict[str, Any]:
        found = {"auto": self.ready.task.options.get("auto"), "forecast": forecast and forecast.as_json()}
        return {name: value for name, value in found.items() if value is not None}

    def _banner(
        self, cursor: Cursor, loaded: OpenCheckpoint | None, *, feed: BatchLoader, loop: Loop
    ) -> tuple[str, ...]:
        settings = self.ready.settings
        parameters = self._parameters()
        lines = [f"run: {self.run.path}", f"model: {plural(parameters, 'trainable parameter')}", *self.ready.plan.notes]
        samples = feed.num_samples
        lines += [] if samples is None else [f"data: {plural(samples, 'sample')} per epoch"]
        lines += [*feed.notes, *self.built.notes]
        when = f"save {format_interval(loop.save_every, total=loop.total_steps)}"
        if self.ready.job.eval_data is not None:
            when = f"evaluate {format_interval(loop.eval_every, total=loop.total_steps)}, {when}"
        lines.append(f"steps: {loop.total_steps or 'until the data ends'}, {when}")
        rule = self.ready.plan.rule
        lines += rule_planning(rule).length_notes(rule, total_steps=loop.total_steps)
        lines.append(f"precision: {settings.train.precision}{', exact' if settings.train.exact else ''}")
        if any(norms_with_statistics(self.built.model)):
            lines.append(step_rule(rule).buffer_note(settings.train.buffers))
        micro, is_resumed = self.ready.plan.micro_batch_size, self.resume is not None
        lines += evaluation_notes(
            self.ready.job, settings, model=self.built.model, micro_batch_size=micro, is_resumed=is_resumed
        )
        lines += last_batch_notes(
            self.ready.plan,
            settings,
            self.built.model,
            samples=samples,
            total_steps=loop.total_steps,
            is_resumed=is_resumed,
        )
        scale = settings.train.lr_scaling
        lines.append(f"lr: {loop.built.update.optimizers[0].param_groups[0]['lr']:.3g} (scaling: {scale})")
        if loaded is None and self.resume is not None:
            lines.append("resumed: nothing had been saved, so the run starts at its first step")
        if loaded is not None:
            own = loaded.is_in(self.run.checkpoints)
            lines.append(
                f"resumed: {loaded.path.name if own else loaded.path}, {plural(cursor.samples, 'sample')} consumed"
            )
            lines += loop.rule_changes
            was = began_as(loaded)["data"]["num_samples"]
            lines += changed_length(was, samples, cursor=cursor, total=loop.total_steps)
            early = list(stopped_early(self.ready.job, loop.progress, step=cursor.step))
            over = loop.is_over() and not loop.progress.unjudged
            lines += early or ([nothing_left(settings, step=cursor.step, total=loop.total_steps)] if over else [])
        return tuple(lines)


def _told(facts: DatasetProperties | None) -> dict[str, Any]:
    """Return the data properties in the form that a checkpoint stores."""
    if facts is None:
        return {"num_samples": None, "data": "stream"}
    return {"num_samples": facts.num_samples, "data": f"{facts.fingerprint:08x}"}
