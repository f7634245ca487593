"""Who failed first, decided from what is known and from nothing else."""

from collections.abc import Mapping, Sequence

from paceline.survive.failure import Failure

_LOST = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out waiting",
    "recvValue failed".lower(),
    "socket",
    "peer",
    "gloo",
    "nccl",
)


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The failure that caused the others.

    A signal that we did not send comes first: its victim could write nothing. Then the earliest exception
    that is not a lost connection. A lost connection is what the others see when the culprit has gone.
    """
    if not failures:
        return None
    return min(failures, key=lambda f: (_severity(f), f.monotonic_ns))


def _severity(failure: Failure) -> int:
    if failure.kind == "signal":
        return 0
    return 2 if is_lost_connection(failure) else 1


def is_lost_connection(failure: Failure) -> bool:
    """Whether this is only the echo of another rank's end."""
    if failure.kind not in (
        "RuntimeError",
        "DistBackendError",
        "DistNetworkError",
        "DistError",
        "MachineError",
    ):
        return False
    if failure.kind.startswith("Dist"):
        return True
    text = failure.message.lower()
    return any(word in text for word in _LOST)


def exit_code(statuses: Mapping[int, int], first: Failure | None) -> int:
    """The run's exit code: 0, the failure's own, or 75 where every rank stopped early and saved."""
    if first is not None:
        return first.exit_code
    return max(statuses.values(), default=0)
