"""The number of ranks of a run that may continue with fewer: when it shrinks, and when it grows again.

`RestartPolicy` asks this class after each failed attempt. Like the policy, it reads no clock and starts no process.
"""

from collections.abc import Sequence

from paceline.config.settings import Survive
from paceline.console.formatting import plural
from paceline.launch.failures.failure_record import Failure

_GROW_FACTOR = 6  # a run is small for at least this many times `replace_seconds`
_MAX_GROW_SECONDS = 3600.0


class Resizing:
    """The current number of ranks of a run, and how long a lost rank has failed to return.

    `counts` has the possible numbers of ranks, the largest first. A rank is lost if attempts fail before they complete
    a step, for `replace_seconds`. The run then continues with the next smaller number. After six times that long, at
    its next save, it tries the largest number again. After each such try that fails, it waits twice as long.
    """

    def __init__(self, counts: Sequence[int], *, replace_seconds: float = Survive().replace_within) -> None:
        self._counts = tuple(counts)
        self._replace_seconds = replace_seconds
        self._index = 0
        self._lost_since: float | None = None
        self._is_growing = False
        self._grow_seconds = _GROW_FACTOR * replace_seconds
        self._grow_time = 0.0

    @property
    def ranks(self) -> int:
        """The number of ranks of the next attempt; 0 if it never changes."""
        return self._counts[self._index] if self._counts else 0

    @property
    def can_shrink(self) -> bool:
        """Return whether there is a smaller number."""
        return self._index + 1 < len(self._counts)

    @property
    def is_small(self) -> bool:
        """Return whether the run has fewer ranks than it could have."""
        return self._index > 0

    def record_progress(self) -> None:
        """Record that an attempt completed a step: all of its ranks work."""
        self._lost_since = None
        if not self.is_small:
            self._grow_seconds = _GROW_FACTOR * self._replace_seconds
        self._is_growing = False

    @property
    def is_growing(self) -> bool:
        """Return whether the current attempt tries the largest number again, and no attempt has worked with it yet."""
        return self._is_growing

    @property
    def is_waiting(self) -> bool:
        """Return whether attempts fail before their first step, and the ranks still have time to return."""
        return self._lost_since is not None

    def shrink_if_lost(self, failure: Failure, *, time: float) -> str:
        """Record a failure before the first step of an attempt. Return why the run shrinks; "" if it does not yet."""
        if not self.can_shrink or failure.rank < 0:
            self._lost_since = None
            return ""
        if self._lost_since is None:
            self._lost_since = time  # the first failure may have any cause
            return ""
        if time - self._lost_since < self._replace_seconds:
            return ""
        return self.shrink(f"rank {failure.rank} could not be replaced", time=time)

    def shrink(self, reason: str, *, time: float) -> str:
        """Choose the next smaller number, and return the line that says so."""
        if self._is_growing:
            self._grow_seconds = min(_MAX_GROW_SECONDS, 2 * self._grow_seconds)
        self._index, self._lost_since, self._is_growing = self._index + 1, None, False
        self._grow_time = time + self._grow_seconds
        return f"{reason}; continuing with {plural(self.ranks, 'rank')} of {self._counts[0]}"

    def grow_if_due(self, *, time: float) -> str:
        """Choose the largest number if the time has come. Return the line that says so, or ""."""
        if not self.is_small or time < self._grow_time:
            return ""
        before, self._index, self._is_growing = self.ranks, 0, True
        return f"restarting with {plural(self.ranks, 'rank')} instead of {before}, to see whether all are back"
