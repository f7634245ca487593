"""Resume checks: compare what must not change between a saved run and its resume."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.lr_schedule_state import schedule_difference
from paceline.checkpoint.optimizer_options import optimizer_difference
from paceline.config.loading import JOB, default_of
from paceline.config.resume_allowances import TOLD_SETTINGS
from paceline.config.secret_settings import mask_value
from paceline.config.settings import Settings
from paceline.errors import ResumeError
from paceline.launch.launcher import KERNELS_VARIABLE

_BEFORE = {"update": "sync", "compress": "none"}  # of runs that did not say
_LATER = frozenset(
    {"job", "max_grad_norm", "ema", "buffers", "drop_last", "sample_seeds"}
)  # earlier runs did not record them
_CAUSE = "a different setting, a different job file, or different data"


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], *, allow: Sequence[str]) -> None:
    """Check that a resume continues the same run.

    Exact mode uses other kernels: if it or they may change, so may the last bits of data that a job computes. Kernels
    are part of a run's identity if it is exact before and after, and its checkpoint names them.

    Raises:
        ResumeError: with every difference.
    """
    if any(name in allow and saved.get(name) != now[name] for name in ("exact", "kernels")):
        now = {**now, "data": {**now["data"], "fingerprint": saved["data"]["fingerprint"]}}
    if not (saved.get("exact") and now["exact"] and "kernels" in saved):
        now = {name: value for name, value in now.items() if name != "kernels"}
    compared = [name for name in now if name not in allow and (name in saved or name not in _LATER)]
    differing = {name: _difference(name, saved, now) for name in compared}
    changed = [name for name, text in differing.items() if text]
    if changed:
        lines = [f"{name}: {differing[name]}" for name in changed]
        cause, hint = _CAUSE, f"--allow {','.join(changed)} to resume anyway"
        if changed == ["kernels"]:
            cause = f"a different {KERNELS_VARIABLE} in the environment, which changes the last bits"
            hint = f"{KERNELS_VARIABLE}={saved['kernels']} before the same command, or {hint}"
        raise ResumeError(f"this run differs from the one that was saved: {'; '.join(lines)}.", cause=cause, hint=hint)


def record_settings(settings: Settings) -> dict[str, str]:
    """Return the settings and the parameters of `make_job` as text; a resume reports changes without refusing them.

    The value of a secret is not recorded.
    """
    found = {name: str(_value(settings, name)) for name in TOLD_SETTINGS}
    return found | {f"{JOB}.{name}": mask_value(name, value) for name, value in settings.job.items()}


def note_changes(saved: Mapping[str, str] | None, settings: Settings) -> list[str]:
    """Return a line for each recorded value that has changed; none for an older checkpoint without a record."""
    if saved is None:
        return []
    now = record_settings(settings)
    found = []
    for name in dict.fromkeys([*saved, *now]):
        why = TOLD_SETTINGS.get(
            name, "its effect on model, data, optimizer and schedule was compared, its code was not"
        )
        was, has = (values.get(name, _unset(name)) for values in (saved, now))
        if was != has:
            found.append(f"{name} was {_short(was)} in the checkpoint and is {_short(has)} now: {why}")
    return found


def _value(settings: Settings, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _unset(name: str) -> str:
    return "the job's own" if name.startswith(f"{JOB}.") else str(default_of(name))


def _difference(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    was, has = saved.get(name, _BEFORE.get(name)), now[name]
    if name == "optimizer":
        return optimizer_difference(was, has)
    if name == "schedule":
        differs = bool(optimizer_difference(saved.get("optimizer"), now["optimizer"]))
        return schedule_difference(was, has, lr_differs=differs)
    if name == "job" and not (was and has):  # one of them was an object of Python
        return ""
    if name == "ema" and was is None:  # one that is added begins at the weights, and stands in the banner
        return ""
    return "" if was == has else f"was {_short(was)}, is {_short(has)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
