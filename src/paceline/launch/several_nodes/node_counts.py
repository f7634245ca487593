"""The numbers of nodes with which a run may train, and what attempts have taught about them."""

from collections.abc import Sequence


class NodeCounts:
    """The numbers of nodes that fit the layout, the largest first. The job may still refuse one of them."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.first_count = counts[0]
        self._counts = tuple(counts)
        self._fitting_count = 0  # the number of nodes of an attempt whose number fitted the job

    @property
    def largest_count(self) -> int:
        """The largest number that the job has not refused."""
        return self._counts[0]

    @property
    def smallest_count(self) -> int:
        """The smallest number."""
        return self._counts[-1]

    @property
    def is_fixed(self) -> bool:
        """True if there is only one number."""
        return len(self._counts) == 1

    def largest_within(self, num_present: int) -> int:
        """Return the largest number of nodes that these can be; 0 if they are too few."""
        return next((count for count in self._counts if count <= num_present), 0)

    def accept(self, count: int) -> None:
        """Learn that an attempt with this number of nodes was not refused."""
        self._fitting_count = count

    def leave_out(self, count: int) -> bool:
        """Learn that the job has refused this number. Return whether the run may continue with another one.

        It may if another number was tried before and was not refused. Otherwise, the number is not the reason.
        """
        if self._fitting_count in (0, count) or count not in self._counts:
            return False
        self._counts = tuple(other for other in self._counts if other != count)
        return True
