"""Several reducers as one: parameters whose gradients are added over other ranks than the rest."""

from collections.abc import Sequence

from torch import Tensor

from paceline.parallel.data_parallel.reducer import Reducer


class ComposedReducer:
    """What each is told, all are. `meets`: whether the forward itself waits for other ranks."""

    def __init__(self, reducers: Sequence[Reducer], *, meets: bool) -> None:
        self._reducers = list(reducers)
        self._meets = meets

    @property
    def meets(self) -> bool:
        """Whether all ranks must run equally many microbatches."""
        return self._meets or any(reducer.meets for reducer in self._reducers)

    def begin(self) -> None:
        """Forget the last step's gradients."""
        for reducer in self._reducers:
            reducer.begin()

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """A microbatch is about to run backward."""
        for reducer in self._reducers:
            reducer.before_backward(last=last, counts=counts)

    def after_backward(self) -> None:
        """A microbatch has run backward."""
        for reducer in self._reducers:
            reducer.after_backward()

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Leave the global gradients."""
        told = [reducer.finish(divisor=divisor) for reducer in self._reducers]
        return all(told)

    def close(self) -> None:
        """Remove the hooks."""
        for reducer in self._reducers:
            reducer.close()
