"""The one loop: step, log, perhaps evaluate, perhaps save, perhaps stop. It can't tell which step runs."""

import math
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ExitCode
from paceline.events import EvalDone, Note, StepDone, Stream
from paceline.faults import Faults
from paceline.feed.feed import Feed
from paceline.feed.types import StepInput
from paceline.job import EarlyStopping
from paceline.order.cursor import Cursor
from paceline.pulse import Pulse
from paceline.step.result import StepResult
from paceline.survive.signals import StopFlag
from paceline.train.built import Built, best_rule, early_stopping
from paceline.train.evaluate import Evaluator
from paceline.train.replicas import check_replicas
from paceline.train.saving import Saver
from paceline.train.statistics import statistics


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long to train; the first limit that is reached ends the run."""

    steps: int | None = None
    samples: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    epoch_samples: int | None = None

    def total_steps(self, *, batch: int, drop_last: bool) -> int | None:
        """The number of steps, where it is known before."""
        if self.steps is not None:
            return self.steps
        if self.samples is not None and self.epoch_samples is None:
            return math.ceil(self.samples / batch)
        if self.epoch_samples is None or (self.epochs is None and self.samples is None):
            return None
        per_epoch = self.epoch_samples // batch if drop_last else math.ceil(self.epoch_samples / batch)
        epochs = self.epochs if self.epochs is not None else (self.samples or 0) / self.epoch_samples
        return max(1, math.ceil(per_epoch * epochs))

    def reached(self, cursor: Cursor, *, tokens: float, total: int | None) -> bool:
        """Whether the run is over at this cursor."""
        if total is not None and cursor.step >= total:
            return True
        if self.tokens is not None and tokens >= self.tokens:
            return True
        if self.samples is not None and self.epoch_samples is None and cursor.samples >= self.samples:
            return True
        return total is None and self.epochs is not None and cursor.epoch >= self.epochs


@dataclass
class Progress:
    """What the loop remembers beside the cursor; saved with it."""

    tokens: float = 0.0
    best: float | None = None
    waited: int = 0
    saves_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"tokens": self.tokens, "best": self.best, "waited": self.waited}


@dataclass
class Clock:
    """Seconds since the last logged step, by what they went to."""

    began: float = field(default_factory=time.perf_counter)
    steps: int = 0
    samples: int = 0
    tokens: float = 0.0
    data: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    saving: float = 0.0


class Loop:
    """One rank's loop. Decisions are joint: they follow from values that every rank has alike."""

    def __init__(
        self,
        *,
        built: Built,
        feed: Feed,
        saver: Saver,
        stream: Stream,
        pulse: Pulse | None,
        faults: Faults,
        stop: StopFlag,
        length: Length,
        cursor: Cursor,
        progress: Progress,
        on_eval_target: Any = None,
    ) -> None:
        self.built = built
        self.cursor = cursor
        self.progress = progress
        self.stream = stream
        self.feed = feed
        self.stopping = False
        self.reason = ""
        self._saver = saver
        self._pulse = pulse
        self._faults = faults
        self._stop = stop
        self._length = length
        self._target = on_eval_target
        self._clock = Clock()
        self._data_began = time.perf_counter()
        batch, drop_last = built.plan.global_batch_size, built.settings.data.drop_last
        self.total_steps = length.total_steps(batch=batch, drop_last=drop_last)
        self.save_every = built.settings.checkpoint.every or derived_interval(self.total_steps)
        self.eval_every = built.settings.eval.every or derived_interval(self.total_steps)
        self._rule = early_stopping(built.job)
        self._evaluator = Evaluator(
            job=built.job,
            model=built.model,
            world=built.world,
            seed=built.settings.seed,
            autocast=built.step.autocast,
        )
        self._last: StepResult | None = None

    def batches(self) -> Iterator[StepInput]:
        """This replica's share of each step, until the run is over or stopped."""
        if self._is_over():
            return
        self._data_began = time.perf_counter()
        for given in self.feed:
            self._clock.data += time.perf_counter() - self._data_began
            yield given
            if self.stopping or self._is_over():
                return
            self._data_began = time.perf_counter()

    def step(self, given: StepInput) -> StepResult:
        """One optimizer step and all that belongs after it."""
        number = self.cursor.step + 1
        self._faults.fire("step", step=number)
        result = self.built.step.run(given, stop=self._stop.requested)
        self.cursor = given.batch.after
        self._last = result
        self._count(result)
        self._after(result)
        return result

    def evaluate(self, *, split: str = "eval", data: Any = None) -> EvalDone:
        """Exact metrics of the present weights (of the average, where there is one) on a split."""
        data = data if data is not None else getattr(self.built.job, f"{split}_data")
        ema = self.built.update.ema
        if ema is not None:
            ema.swap()
        try:
            size = self.built.settings.eval.batch_size or self.built.plan.micro_batch_size
            found = self._evaluator.run(
                data, batch_size=size, workers=self.built.settings.data.workers, name=f"{split}_data", beat=self._beat
            )
            extra = dict(self.built.job.on_eval(self._target) or {}) if self.built.job.on_eval else {}
        finally:
            if ema is not None:
                ema.swap()
        numbers = {name: float(value) for name, value in extra.items() if isinstance(value, int | float)}
        event = EvalDone(
            step=self.cursor.step,
            split=split,
            metrics={**found.metrics, **numbers},
            samples=found.samples,
            seconds=found.seconds,
            extra={name: str(value) for name, value in extra.items() if name not in numbers},
        )
        self.stream.emit(event)
        return event

    def save(self, *, best: bool = False) -> None:
        """Save now; every rank calls this."""
        began = time.perf_counter()
        self._faults.fire("save", step=self.cursor.step)
        for event in self._saver.save(cursor=self.cursor, feed=self.feed, extra=self.progress.as_json(), best=best):
            self.stream.emit(event)
        self._clock.saving += time.perf_counter() - began

    def finish(self) -> ExitCode:
        """Save what is not saved, and say how it ended."""
        if self._saver.last_saved != self.cursor.step:
            self.save()
        over = self._is_over() or self.reason == "early"
        return ExitCode.DONE if over else ExitCode.STOPPED

    def request_stop(self) -> None:
        """Stop after this step; every rank calls this."""
        self.stopping = True

    def _after(self, result: StepResult) -> None:
        settings = self.built.settings
        step = self.cursor.step
        over = self._is_over()
        if result.agreed.stop:
            self.stopping, self.reason = True, "signal"
        if settings.train.check_every and step % settings.train.check_every == 0:
            check_replicas(self.built.model, world=self.built.world, step=step)
        if step % settings.log.every == 0 or over or step == 1:
            self._log(result)
        improved = False
        if self.built.job.eval_data is not None and (step % self.eval_every == 0 or over) and not self.stopping:
            self._faults.fire("eval", step=step)
            improved = self._judge(self.evaluate())
        if improved or step % self.save_every == 0 or over or self.stopping:
            self.save(best=improved)
        self._beat()

    def _judge(self, event: EvalDone) -> bool:
        """Whether this is the best so far; and whether to stop early. The metrics are everybody's."""
        metric, mode = best_rule(self.built.job)
        value = event.metrics.get(metric)
        if value is None:
            known = ", ".join(event.metrics)
            self.stream.emit(Note(text=f"best={metric!r} is no metric of this job ({known})", level="warning"))
            return False
        sign = 1.0 if mode == "max" else -1.0
        improved = self.progress.best is None or sign * value > sign * self.progress.best
        self._patience(event)
        if improved:
            self.progress.best = value
        return improved

    def _patience(self, event: EvalDone) -> None:
        rule = self._rule
        if rule is None or rule.metric not in event.metrics:
            return
        if self._better(rule, event.metrics[rule.metric]):
            self.progress.waited = 0
            return
        self.progress.waited += 1
        if self.progress.waited >= rule.patience:
            self.stopping, self.reason = True, "early"
            text = f"early stop: {rule.metric} has not improved in {rule.patience} evaluations"
            self.stream.emit(Note(text=text))

    def _better(self, rule: EarlyStopping, value: float) -> bool:
        if self.progress.best is None:
            return True
        gain = value - self.progress.best if rule.mode == "max" else self.progress.best - value
        return gain > rule.min_delta

    def _count(self, result: StepResult) -> None:
        clock = self._clock
        clock.steps += 1
        clock.samples += result.samples
        clock.compute += result.compute_seconds
        clock.communication += result.communication_seconds
        tokens = max(result.agreed.counts.values(), default=0.0)
        clock.tokens += tokens
        self.progress.tokens += tokens

    def _log(self, result: StepResult) -> None:
        clock, now = self._clock, time.perf_counter()
        seconds = (now - clock.began) / max(clock.steps, 1)
        self.stream.emit(
            StepDone(
                step=self.cursor.step,
                epoch=self._epoch(),
                samples=self.cursor.samples,
                loss=result.loss,
                terms=result.terms,
                grad_norm=result.grad_norm,
                lr=self.built.update.optimizers[0].param_groups[0]["lr"],
                step_seconds=seconds,
                data_seconds=clock.data / max(clock.steps, 1),
                compute_seconds=clock.compute / max(clock.steps, 1),
                communication_seconds=clock.communication / max(clock.steps, 1),
                checkpoint_seconds=clock.saving / max(clock.steps, 1),
                samples_per_second=clock.samples / max(now - clock.began, 1e-9),
                tokens_per_second=clock.tokens / max(now - clock.began, 1e-9)
                if clock.tokens != clock.samples
                else None,
                memory_peak_gib=peak_gib(self.built.world.device),
                statistics=statistics(self.built.named) if self.built.settings.log.statistics else {},
            )
        )
        self._clock = Clock()

    def _epoch(self) -> float:
        if self.feed.num_samples is None:
            return float(self.cursor.epoch)
        return self.cursor.epoch + self.cursor.position / self.feed.num_samples

    def _is_over(self) -> bool:
        return self._length.reached(self.cursor, tokens=self.progress.tokens, total=self.total_steps)

    def _beat(self) -> None:
        if self._pulse is not None:
            loss = self._last.loss if self._last is not None and self.built.world.device.type == "cpu" else 0.0
            self._pulse.beat(step=self.cursor.step, total=self.total_steps or 0, loss=loss)


def derived_interval(total: int | None) -> int:
    """Ten times in a run, or every thousand steps where its length is not known."""
    return max(1, total // 10) if total else 1000


def peak_gib(device: torch.device) -> float:
    """The most memory this rank has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def event_folder(environ: dict[str, str]) -> Path | None:
    """Where this attempt's logs are, if we were started by our own agent."""
    folder = environ.get("PACELINE_ATTEMPT_FOLDER")
    return Path(folder) if folder else None


Callback = Callable[[], None]
