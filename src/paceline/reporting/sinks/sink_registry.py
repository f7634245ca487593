"""The table of sinks by name; `"my.pkg:Thing"` names a sink of the user."""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError
from paceline.events import EvalDone, Event, ForecastChecked, RunStarted, Sink, StepDone, forecast_ratios, step_metrics
from paceline.plugins import resolve
from paceline.reporting.sinks.console_lines import ConsoleSink
from paceline.reporting.sinks.jsonl import JsonlSink
from paceline.run_folder.run_folder import RunFolder


class TensorBoardSink:
    """A sink for TensorBoard scalars, in `tb/` of the run folder.

    All numbers of a step are written as one record, which saves a third of a millisecond. A resume purges the steps of
    earlier attempts that it repeats, so that two curves never overlap.
    """

    name = "TensorBoard"

    def __init__(self, run: RunFolder) -> None:
        self._writer_class: Any = resolve("torch.utils.tensorboard:SummaryWriter")
        self._summary_class: Any = resolve("tensorboard.compat.proto.summary_pb2:Summary")
        self._folder = run.path / "tb"
        self._writer: Any = None

    def handle(self, event: Event) -> None:
        """Write the step's numbers."""
        if isinstance(event, RunStarted):
            self._open(after=event.resumed_from or 0)
        numbers = _numbers(event)
        if numbers:
            self._open(after=None)
            values = [self._summary_class.Value(tag=name, simple_value=value) for name, value in numbers.items()]
            self._writer.file_writer.add_summary(self._summary_class(value=values), event.step)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, *, after: int | None) -> None:
        """Open the writer, if it is not open. The steps after `after` of earlier attempts are purged; with None, none."""
        if self._writer is None:
            has_earlier_events = after is not None and any(self._folder.glob("events.*"))
            purge = after + 1 if has_earlier_events and after is not None else None
            self._writer = self._writer_class(log_dir=str(self._folder), purge_step=purge)


class WandbSink:
    """A sink for Weights & Biases scalars; the name of the run folder is the id. A repeated step keeps its old numbers."""

    name = "Weights & Biases"

    def __init__(self, run: RunFolder) -> None:
        self._run: Any = resolve("wandb:init")(
            project=run.path.resolve().parent.name,
            id=run.path.name,
            name=run.path.name,
            dir=str(run.path),
            resume="allow",
        )

    def handle(self, event: Event) -> None:
        """Log the step's numbers."""
        numbers = _numbers(event)
        if numbers:
            self._run.log(numbers, step=event.step)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _numbers(event: Event) -> dict[str, float]:
    """Return the numbers of an event by metric name; empty for an event without numbers."""
    if isinstance(event, StepDone):
        return dict(step_metrics(event))
    if isinstance(event, ForecastChecked):
        return dict(forecast_ratios(event))
    if isinstance(event, EvalDone):
        return {f"{event.split}/{name}": value for name, value in event.metrics.items()}
    return {}


SINKS: dict[str, Callable[[RunFolder], Sink]] = {
    "console": lambda run: ConsoleSink(),
    "jsonl": JsonlSink,
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
}
CURVE_SINKS = {"tensorboard", "wandb"}  # draw the curves of a training, to which an `evaluate` later adds nothing
_OPTIONAL = {"tensorboard"}  # left out with a note if the package is not installed
_REQUIRED = {"wandb": "wandb:init"}  # an error if this object can't be imported


def make_sinks(names: Sequence[str], *, run: RunFolder) -> tuple[list[Sink], list[str]]:
    """Return the sinks of one run, and notes about sinks that are not installed or could not start.

    Raises:
        UsageError: a name names no sink, or a required package is not installed.
    """
    sinks: list[Sink] = []
    notes: list[str] = []
    for name in names:
        try:
            sinks.append(_make_sink(name, run))
        except (ImportError, UsageError):
            if name not in _OPTIONAL:
                raise
            notes.append(f"{name} is not installed and is left out: pip install {name}")
        except Exception as error:
            notes.append(f"{name} could not start and is left out: {type(error).__name__}: {error}")
    return sinks, notes


def check_names(names: Sequence[str]) -> None:
    """Check that each name is a sink or a reference to one.

    Raises:
        UsageError: a name is neither a sink nor a reference; the message has a suggestion.
    """
    for name in names:
        if ":" not in name and name not in SINKS:
            raise UsageError(
                f"{name!r} is not a sink.",
                cause=did_you_mean(name, SINKS),
                hint=f"--watch.to {','.join(SINKS)} or my.pkg:Thing",
            )
        module, colon, attribute = name.partition(":")
        if colon and not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
            raise UsageError(f"{name!r} does not name a sink.", hint="--watch.to my.pkg:Thing")


def missing_sink_errors(names: Sequence[str], *, folders: Sequence[Path]) -> list[PacelineError]:
    """Return an error for each sink whose package is neither installed nor in `folders`, without importing any."""
    errors: list[PacelineError] = []
    for name in names:
        reference = name if ":" in name else _REQUIRED.get(name, "")
        package = reference.partition(":")[0].partition(".")[0]
        candidates = [folder / package for folder in folders]
        if (
            package
            and not any(candidate.is_dir() or candidate.with_suffix(".py").is_file() for candidate in candidates)
            and package not in sys.modules
            and find_spec(package) is None
        ):
            errors.append(UsageError(f"{reference!r}: no module named {package!r}.", hint="pip install it"))
    return errors


def _make_sink(name: str, run: RunFolder) -> Sink:
    check_names([name])
    if ":" in name:
        sink: Sink = resolve(name)(run)
        return sink
    return SINKS[name](run)
