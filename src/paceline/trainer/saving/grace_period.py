"""The grace period: the time that a scheduler leaves a run between its stop signal and the kill."""

from collections.abc import Callable

from paceline.config.settings import Settings
from paceline.console.formatting import format_duration
from paceline.events import CheckpointSaved, Event, EventBus, Note, StepDone


class GracePeriodSink:
    """A sink that compares the time of a step and a save with the grace period.

    It emits a note after the first save, and a warning after the first one that takes too long.
    """

    def __init__(self, seconds: float, *, emit: Callable[[Event], None]) -> None:
        self._seconds = seconds
        self._emit = emit
        self._step_seconds = 0.0
        self._has_reported = False
        self._has_warned = False

    def handle(self, event: Event) -> None:
        """Remember the time of a step, and check the time of a save."""
        if isinstance(event, StepDone):
            self._step_seconds = event.step_seconds
        elif isinstance(event, CheckpointSaved):
            self._check(event.seconds + event.background_seconds)  # a stop waits for the disk

    def close(self) -> None:
        """Do nothing."""

    def _check(self, save_seconds: float) -> None:
        is_late = self._step_seconds + save_seconds > self._seconds
        times = f"a step takes {format_duration(self._step_seconds)} and a save {format_duration(save_seconds)}"
        grace = f"the grace period is {format_duration(self._seconds)} (survive.grace)"
        if is_late and not self._has_warned:
            self._has_warned = True
            text = (
                f"{times}, but {grace}: after a stop signal, the run would be killed before it has saved. It would "
                "lose the steps since its last checkpoint; with a smaller --checkpoint.every, these are fewer"
            )
            self._emit(Note(text=text, level="warning"))
        elif not is_late and not self._has_reported:
            self._has_reported = True
            self._emit(Note(text=f"{times}, and {grace}"))


def watch_grace_period(event_bus: EventBus, settings: Settings) -> None:
    """Add the sink to a run's events, if the run has a grace period."""
    if settings.survive.grace is not None:
        event_bus.add_sink(GracePeriodSink(settings.survive.grace, emit=event_bus.emit))
