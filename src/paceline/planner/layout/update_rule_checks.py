"""Checks of settings that an update rule cannot have, and why: one table for all rules."""

from collections.abc import Iterator, Mapping

from paceline.config.settings import Settings
from paceline.config.update_rule import UpdateKind, UpdateRule
from paceline.errors import PacelineError, UsageError

_LATE = "token counts arrive some steps late, so the end would move after each save"
_MEET = "it synchronises statistics in the forward"
_STASHED = {
    "exact": "only an update that waits for each batch can match one process bit for bit",
    "tokens": _LATE,
    "statistics": "the stages are at different updates when a step is logged",
    "skip": "other stages have already taken the step",
    "sync_bn": "statistics of several weight versions would mix",
    "compile": "a compiled block keeps one weight version",
}
_SITES = {
    "exact": "one process takes different steps than sites do",
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
        "device": "workers share the machine's memory, not a GPU's",
        "exact": "a race is not reproducible",
        "tokens": _LATE,
        "statistics": "each worker has gradients of its own",
        "fp16": "each worker would have its own loss scale",
        "sync_bn": _MEET,
    },
    UpdateKind.PS: {
        "device": "gradients are sent over gloo, which is tested on CPUs only",
        "exact": "the order of arrival is not recorded",
        "tokens": _LATE,
        "statistics": "gradients are those of single shares",
        "fp16": "the loss scale is not sent to workers",
        "sync_bn": _MEET,
        "compile": "it has not been tried",
        "workers": "a worker's next share is not known before it asks",
    },
}


def check_update_settings(update: UpdateRule, settings: Settings, *, device: str = "cpu") -> Iterator[PacelineError]:
    """Yield an error for each setting that the update rule cannot have."""
    why = _WHY.get(update.kind, {})
    for key, (is_on, name, hint) in _asked(settings, device=device).items():
        if is_on and key in why:
            yield UsageError(f"{name} with --update {update.kind} is not supported.", cause=why[key], hint=hint)


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
