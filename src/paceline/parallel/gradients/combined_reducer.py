"""A reducer composed of several, for parameters whose gradients are summed over different groups of ranks."""

from collections.abc import Sequence

from torch import Tensor

from paceline.parallel.data_parallel.reducer import Reducer


class ComposedReducer:
    """A reducer that forwards each call to several reducers.

    Set `needs_equal_microbatches` if the forward communicates too: then all ranks must run equally many microbatches.
    """

    def __init__(self, reducers: Sequence[Reducer], *, needs_equal_microbatches: bool) -> None:
        self._reducers = list(reducers)
        self._needs_equal_microbatches = needs_equal_microbatches

    @property
    def needs_equal_microbatches(self) -> bool:
        """Return whether all ranks must run equally many microbatches."""
        return self._needs_equal_microbatches or any(reducer.needs_equal_microbatches for reducer in self._reducers)

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        for reducer in self._reducers:
            reducer.begin()

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Prepare all reducers for a microbatch's backward."""
        for reducer in self._reducers:
            reducer.before_backward(last=last, has_samples=has_samples)

    def after_backward(self) -> None:
        """Collect gradients in all reducers after a microbatch's backward."""
        for reducer in self._reducers:
            reducer.after_backward()

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Store the global gradients; return False if any reducer needs the step to be rerun."""
        results = [reducer.finish(divisor=divisor) for reducer in self._reducers]
        return all(results)

    def close(self) -> None:
        """Remove the gradient hooks."""
        for reducer in self._reducers:
            reducer.close()
