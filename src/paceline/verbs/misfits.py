"""What was asked for and has nowhere to go: checked before a process starts."""

from collections.abc import Sequence

from paceline.errors import PacelineError, UsageError
from paceline.faults import Fault
from paceline.launch.environments import Joined
from paceline.spec.read import Asked
from paceline.spec.words import did_you_mean


def beyond_threads(joined: Joined | None, faults: Sequence[Fault]) -> list[PacelineError]:
    """Replicas as threads need a world of one process, which is rank 0."""
    problems: list[PacelineError] = []
    beyond = [fault.rank for fault in faults if fault.rank]
    if beyond:
        problems.append(
            UsageError(
                f"a fault on rank {beyond[0]}, but layout threads is one process, rank 0.",
                hint='--faults "kill rank=0 step=50", or --layout ddp',
            )
        )
    if joined is not None and joined.world_size > 1:
        problems.append(
            UsageError(
                f"layout threads is one process, {joined.kind} started {joined.world_size}.",
                hint="--layout ddp, or one process: paceline train JOB --layout threads --ranks 2",
            )
        )
    return problems


def unknown_parameters(known: dict[str, str] | None, asked: Asked) -> list[PacelineError]:
    """Settings of `job.` that its function does not take; None where it is not known what it takes."""
    if known is None:
        return []
    names = [name[4:] for name in asked.values if name.startswith("job.")]
    return [
        UsageError(
            f"make_job has no parameter {name!r}.",
            where=asked.origins.get(f"job.{name}", ""),
            cause=did_you_mean(name, known),
            hint=f"it takes: {', '.join(known) or 'none'}",
        )
        for name in names
        if name not in known
    ]
