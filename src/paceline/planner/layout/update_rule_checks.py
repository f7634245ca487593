"""Checks of settings that an update rule cannot have, and why: one table for all rules."""

from collections.abc import Iterator, Mapping

from paceline.config.settings import Settings
from paceline.config.update_rule import UpdateKind, UpdateRule
from paceline.errors import PacelineError, UsageError

_LATE = "tokens are heard some steps late, so the end would lie elsewhere after each save"
_MEET = "its statistics meet in the forward"
_STASHED = {
    "exact": "one process of the same bits is one that waits for each batch",
    "tokens": _LATE,
    "statistics": "the stages are at different updates whenever a step is logged",
    "skip": "other stages have taken the step already",
    "sync_bn": "statistics of several times would meet",
    "compile": "a compiled block holds on to one version",
}
_SITES = {
    "exact": "one process takes other steps than sites do",
    "tokens": _LATE,
    "statistics": "each site has gradients of its own",
    "sync_bn": _MEET,
}
_WHY: Mapping[UpdateKind, Mapping[str, str]] = {
    UpdateKind.PIPEDREAM: _STASHED,
    UpdateKind.DOUBLE: _STASHED,
    UpdateKind.LOCAL: _SITES,
    UpdateKind.DILOCO: _SITES,
    UpdateKind.HOGWILD: {
        "device": "workers share the memory of the machine, not a GPU's",
        "exact": "a race has no bits that come again",
        "tokens": _LATE,
        "statistics": "each worker has gradients of its own",
        "fp16": "the loss scale would be each worker's own",
        "sync_bn": _MEET,
    },
    UpdateKind.PS: {
        "device": "gradients travel over gloo, tried on CPUs only",
        "exact": "who comes first is not written anywhere",
        "tokens": _LATE,
        "statistics": "gradients are those of single shares",
        "fp16": "the loss scale is not sent to workers",
        "sync_bn": _MEET,
        "compile": "it has not been tried",
        "workers": "nobody knows a worker's next share before it asks",
    },
}


def check_update_settings(update: UpdateRule, settings: Settings, *, device: str = "cpu") -> Iterator[PacelineError]:
    """Yield an error for each setting that the update rule cannot have."""
    why = _WHY.get(update.kind, {})
    for key, (is_on, name, hint) in _asked(settings, device=device).items():
        if is_on and key in why:
            yield UsageError(f"{name} with --update {update.kind} can't be had.", cause=why[key], hint=hint)


def _asked(settings: Settings, *, device: str) -> dict[str, tuple[bool, str, str]]:
    """Return by key: if the setting is on, its name, and what to type instead."""
    train = settings.train
    skips = train.on_nonfinite == "skip"
    return {
        "device": (device != "cpu", f"--device {device}", "--device cpu"),
        "exact": (train.exact, "--train.exact", "leave it out, or --update sync"),
        "tokens": (train.tokens is not None, "--train.tokens", "--train.steps, --train.samples or --train.epochs"),
        "statistics": (settings.log.statistics, "--log.statistics", "leave it out, or --update sync"),
        "fp16": (train.precision == "fp16", "fp16", "--train.precision bf16"),
        "skip": (skips, "--train.on_nonfinite skip", "--train.on_nonfinite stop"),
        "sync_bn": (train.buffers == "sync_bn", "sync_bn", "leave --train.buffers out"),
        "compile": (train.compile, "--train.compile", "leave it out"),
        "workers": (settings.data.workers > 0, "--data.workers", "--data.workers 0: a worker reads its own samples"),
    }
