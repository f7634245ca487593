"""What was asked for and has nowhere to go: checked before a process starts."""

from paceline.errors import PacelineError, UsageError
from paceline.spec.read import Asked
from paceline.spec.words import did_you_mean


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
