"""Selection of the first failure from the failure records of all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.launch.failures.failure_record import Failure

_SIGNAL_DELAY_NS = 50_000_000


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that caused the others.

    Lost connections sort last, because other ranks report them after the failed rank has exited. The supervisor notices
    a signal shortly after the signal ended the rank, so the failure is sorted as if it were 50 ms earlier. A non-finite
    loss stops every rank; then the failure of the first rank that computed such a loss is returned.
    """
    if not failures:
        return None
    first = min(failures, key=lambda f: (f.is_lost_connection, _sort_time(f)))
    ranks = first.said.get("ranks")
    if not ranks or first.rank in ranks:
        return first
    same_kind = (failure for failure in failures if failure.rank == ranks[0] and failure.kind == first.kind)
    return next(same_kind, replace(first, rank=ranks[0], told_by=first.rank))


def _sort_time(failure: Failure) -> int:
    return failure.monotonic_ns - (_SIGNAL_DELAY_NS if failure.kind == "signal" else 0)


def exit_code(statuses: Mapping[int, int], first: Failure | None) -> int:
    """Return the run's exit code: the first failure's, else 75 if any rank stopped early and saved, else 0."""
    if first is not None:
        return first.exit_code
    return max(statuses.values(), default=0)
