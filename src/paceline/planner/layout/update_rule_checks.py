"""Look up the planning rules of an update rule, and check settings with them."""

from collections.abc import Iterator, Mapping

from paceline.config.settings import Settings
from paceline.config.update_rule import UpdateKind, UpdateRule
from paceline.errors import PacelineError, UsageError
from paceline.planner.layout.hogwild_checks import HogwildPlanning
from paceline.planner.layout.local_sgd_checks import LocalSgdPlanning
from paceline.planner.layout.parameter_server_checks import ParameterServerPlanning
from paceline.planner.layout.pipedream_checks import PipeDreamPlanning
from paceline.planner.layout.rule_planning import RulePlanning

RULE_PLANNING: Mapping[UpdateKind, RulePlanning] = {
    UpdateKind.SYNC: RulePlanning(),
    UpdateKind.PIPEDREAM: PipeDreamPlanning(),
    UpdateKind.DOUBLE: PipeDreamPlanning(),
    UpdateKind.HOGWILD: HogwildPlanning(),
    UpdateKind.LOCAL: LocalSgdPlanning(),
    UpdateKind.DILOCO: LocalSgdPlanning(),
    UpdateKind.PS: ParameterServerPlanning(),
}

_UNKNOWN_LOSS = "the ranks must know the loss of a step before its update, which needs synchronous updates"
_STEPS_IN_FLIGHT = "a save waits for the steps in flight anyway, and has no checkpoint in memory to copy"
_REASONS_OF_ALL_ASYNCHRONOUS = {
    "on_spike": _UNKNOWN_LOSS,
    "rollback": _UNKNOWN_LOSS,
    "checkpoint.background": _STEPS_IN_FLIGHT,
}


def rule_planning(update: UpdateRule) -> RulePlanning:
    """Return the planning rules of an update rule."""
    return RULE_PLANNING[update.kind]


def check_update_settings(update: UpdateRule, settings: Settings, *, device: str = "cpu") -> Iterator[PacelineError]:
    """Yield an error for each setting that the update rule does not support."""
    common_reasons = {} if update.kind is UpdateKind.SYNC else _REASONS_OF_ALL_ASYNCHRONOUS
    reasons = {**common_reasons, **rule_planning(update).refused_settings}
    for key, (is_on, name, hint) in _checked_settings(settings, device=device).items():
        if is_on and key in reasons:
            yield UsageError(f"{name} with --update {update.kind} is not supported.", cause=reasons[key], hint=hint)


def _checked_settings(settings: Settings, *, device: str) -> dict[str, tuple[bool, str, str]]:
    """Return, for each key of `refused_settings`: whether the setting is on, its name, and what to type instead."""
    train = settings.train
    skips = train.on_nonfinite == "skip"
    return {
        "device": (device != "cpu", f"--device {device}", "--device cpu"),
        "exact": (train.exact, "--train.exact", "leave it out, or --update sync"),
        "train.tokens": (
            train.tokens is not None,
            "--train.tokens",
            "--train.steps, --train.samples or --train.epochs",
        ),
        "log.statistics": (settings.log.statistics, "--log.statistics", "leave it out, or --update sync"),
        "fp16": (train.precision == "fp16", "fp16", "--train.precision bf16"),
        "on_spike": (
            train.on_spike != "ignore",
            f"--train.on_spike {train.on_spike}",
            "leave it out, or --update sync",
        ),
        "rollback": (
            train.on_nonfinite == "rollback",
            "--train.on_nonfinite rollback",
            "--train.on_nonfinite stop",
        ),
        "skip": (skips, "--train.on_nonfinite skip", "--train.on_nonfinite stop"),
        "sync_bn": (train.buffers == "sync_bn", "sync_bn", "leave --train.buffers out"),
        "compile": (train.compile, "--train.compile", "leave it out"),
        "checkpoint.background": (
            settings.checkpoint.background,
            "--checkpoint.background",
            "leave it out, or --update sync",
        ),
        "workers": (
            settings.data.workers > 0,
            "--data.workers",
            "--data.workers 0: each rank that computes gradients then reads its samples itself",
        ),
    }
