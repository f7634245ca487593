"""Define the names that `--allow` accepts, and how a resume treats each setting that differs from the checkpoint's.

Every setting is in exactly one of three tables. A resume refuses another value of a setting in `COMPARED_SETTINGS`,
reports another value of one in `REPORTED_SETTINGS`, and silently accepts any value of one in `FREE_SETTINGS`, because
the training stays the same.
"""

from collections.abc import Mapping

from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError

ALLOWED_DIFFERENCES = (
    "model", "data", "order", "seed", "global_batch_size", "micro_batch_size", "optimizer", "schedule", "max_grad_norm",
    "ema", "job", "exact", "tensor_shards", "sequence_shards", "kernels", "precision", "buffers", "drop_last",
    "sample_seeds", "update", "compress",
)  # fmt: skip
"""The names that `--allow` accepts: what a resume compares with the checkpoint.

Some of them are not settings. `kernels` are the numerical kernels that the environment variable MKL_CBWR selects; they
are compared in exact mode. `order` is a user-defined order of samples.
"""

COMPARED_SETTINGS: Mapping[str, str | None] = {  # the `--allow` name that accepts another value; None if there is none
    "seed": "seed",
    "train.global_batch_size": "global_batch_size",
    "train.micro_batch_size": "micro_batch_size",
    "train.gradient_accumulation_steps": "micro_batch_size",
    "train.max_grad_norm": "max_grad_norm",
    "train.precision": "precision",
    "train.exact": "exact",
    "train.tensor_shards": "tensor_shards",
    "train.lr_scaling": "optimizer",
    "train.buffers": "buffers",
    "data.drop_last": "drop_last",
    "data.sample_seeds": "sample_seeds",
    "data.shards": None,
    "train.sequence_shards": "sequence_shards",
}

REPORTED_SETTINGS: Mapping[str, str] = {  # why another value does not change the training so far
    "train.on_nonfinite": "from here on, steps that would have ended the run are skipped, or the reverse",
    "train.on_spike": "from here on, steps with a spike are treated differently",
    "train.spike_sigma": "from here on, another limit decides what a spike is",
    "train.max_rollbacks": "from here on, another number of steps may be left out",
    "train.on_empty": "from here on, a loss term without targets counts as zero, or ends the run",
    "train.compile": "different kernels: the same training up to rounding",
    "train.backend": "a different order of sums over ranks: the same training up to rounding",
}

_LENGTH = "the length of the run; a schedule that depends on it is compared"
_PLACEMENT = "the placement of the model: the same training up to rounding"
_SPEED = "the speed, or the waiting times"
_REPORTING = "what is logged, evaluated or saved, and when"
FREE_SETTINGS: Mapping[str, str] = {  # what the setting decides
    **dict.fromkeys(("train.steps", "train.epochs", "train.samples", "train.tokens"), _LENGTH),
    **dict.fromkeys(
        (
            "place.units", "place.reshard", "place.prefetch", "place.blocks", "place.stages", "place.balance",
            "place.cut", "place.tensor_plan", "place.replicate",
        ),
        _PLACEMENT,
    ),
    **dict.fromkeys(("train.threads", "train.timeout_seconds", "train.check_every", "data.workers"), _SPEED),
    **dict.fromkeys(
        (
            "eval.every", "eval.batch_size", "log.every", "log.statistics", "checkpoint.every",
            "checkpoint.background", "checkpoint.memory_every", "checkpoint.peer_copies", "checkpoint.keep",
            "checkpoint.remote", "checkpoint.remote_keep", "checkpoint.remote_timeout", "checkpoint.consolidated",
            "watch.to", "run_dir",
        ),
        _REPORTING,
    ),
    **dict.fromkeys(
        (
            "survive.restarts", "survive.min_ranks", "survive.replace_within", "survive.grace", "nodes.wait",
            "nodes.last_call", "nodes.patience", "nodes.restarts", "nodes.interface",
        ),
        "how the run continues after a fault",
    ),
    "init.limit": "how initial values are drawn; a resumed run takes them from its checkpoint",
}  # fmt: skip


def refuse_unknown_allowances(names: tuple[str, ...]) -> list[PacelineError]:
    """Return errors for names that are not in `ALLOWED_DIFFERENCES`; accepting such a name would have no effect."""
    return [
        UsageError(
            f"--allow {name} is not a difference that a resume can accept.",
            cause=did_you_mean(name, ALLOWED_DIFFERENCES),
            hint=f"--allow {','.join(ALLOWED_DIFFERENCES)}: any of these",
        )
        for name in names
        if name not in ALLOWED_DIFFERENCES
    ]
