"""What `--allow` may name: the differences that a resumed run is refused for unless they are accepted."""

from paceline.errors import PacelineError, UsageError
from paceline.spec.words import did_you_mean

ALLOWED = (
    "model", "data", "order", "seed", "global_batch_size", "micro_batch_size", "optimizer", "schedule", "max_grad_norm",
    "ema", "exact", "kernels", "precision", "update", "compress",
)  # fmt: skip


def refuse_unknown_allowances(names: tuple[str, ...]) -> list[PacelineError]:
    """Return the names that are no difference: accepting one would accept nothing."""
    return [
        UsageError(
            f"--allow {name} is no difference that a resumed run can have.",
            cause=did_you_mean(name, ALLOWED),
            hint=f"--allow {','.join(ALLOWED)}: any of these",
        )
        for name in names
        if name not in ALLOWED
    ]
