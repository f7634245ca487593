"""Resume checks: compare what must not change between the saved run and the resumed run."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.lr_schedule_state import has_other_lr, schedule_difference
from paceline.checkpoint.optimizer_options import optimizer_difference
from paceline.config.merge_settings import JOB, default_value
from paceline.config.resume_allowances import REPORTED_SETTINGS
from paceline.config.secret_settings import mask_value
from paceline.config.settings import Settings
from paceline.errors import ResumeError
from paceline.launch.launch_environment import KERNELS_VARIABLE

# the values of checkpoints that do not record these keys
_IDENTITY_DEFAULTS = {"update": "sync", "compress": "none", "tensor_shards": None, "sequence_shards": None}
# keys that earlier versions did not record; without a record they are not compared
_OPTIONAL_KEYS = frozenset({"job", "max_grad_norm", "ema", "buffers", "drop_last", "sample_seeds"})
_CAUSE = "a different setting, a different job file, or different data"


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any], *, allow: Sequence[str]) -> None:
    """Check that a resume continues the same run: compare the saved identity with that of the current job.

    `allow` has the names of entries that may differ. If it permits a change of exact mode or of the kernels, the data's
    fingerprint is not compared, because data that the job computes may differ in its last bits. Kernels are compared
    only if the run uses exact mode before and after the resume, and the checkpoint records them.

    Raises:
        ResumeError: something differs; the message lists every difference.
    """
    if any(name in allow and saved.get(name) != current[name] for name in ("exact", "kernels")):
        current = {**current, "data": {**current["data"], "fingerprint": saved["data"]["fingerprint"]}}
    if not (saved.get("exact") and current["exact"] and "kernels" in saved):
        current = {name: value for name, value in current.items() if name != "kernels"}
    compared = [name for name in current if name not in allow and (name in saved or name not in _OPTIONAL_KEYS)]
    differing = {name: _difference(name, saved, current) for name in compared}
    changed = [name for name, text in differing.items() if text]
    if changed:
        lines = [f"{name}: {differing[name]}" for name in changed]
        cause, hint = _CAUSE, f"--allow {','.join(changed)} to resume anyway"
        if changed == ["kernels"]:
            cause = f"a different {KERNELS_VARIABLE} in the environment, which changes the last bits"
            hint = f"{KERNELS_VARIABLE}={saved['kernels']} before the same command, or {hint}"
        raise ResumeError(f"this run differs from the one that was saved: {'; '.join(lines)}.", cause=cause, hint=hint)


def record_settings(settings: Settings) -> dict[str, str]:
    """Return the settings and the parameters of `make_job` as text; a resume reports a change but accepts it.

    The value of a secret is not recorded.
    """
    recorded = {name: str(_get_setting(settings, name)) for name in REPORTED_SETTINGS}
    return recorded | {f"{JOB}.{name}": mask_value(name, value) for name, value in settings.job.items()}


def describe_changes(saved: Mapping[str, str] | None, settings: Settings) -> list[str]:
    """Return a line for each recorded value that has changed; no line if an old checkpoint has no record (None)."""
    if saved is None:
        return []
    current = record_settings(settings)
    lines = []
    for name in dict.fromkeys([*saved, *current]):
        effect = REPORTED_SETTINGS.get(
            name, "model, data, optimizer and schedule were compared, but not the code of the job"
        )
        saved_value, current_value = (values.get(name, _default_text(name)) for values in (saved, current))
        if saved_value != current_value:
            lines.append(
                f"{name} was {_shorten(saved_value)} in the checkpoint and is {_shorten(current_value)} now: {effect}"
            )
    return lines


def _get_setting(settings: Settings, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _default_text(name: str) -> str:
    return "the job's own" if name.startswith(f"{JOB}.") else str(default_value(name))


def _difference(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return text on how one entry of the identities differs; empty if a resume accepts it."""
    saved_value, current_value = saved.get(name, _IDENTITY_DEFAULTS.get(name)), current[name]
    if name == "optimizer":
        return optimizer_difference(saved_value, current_value)
    if name == "schedule":
        lr_differs = has_other_lr(saved.get("optimizer"), current["optimizer"])
        return schedule_difference(saved_value, current_value, lr_differs=lr_differs)
    if name == "job" and not (
        saved_value and current_value
    ):  # one of the jobs is a Python object, which has no file name
        return ""
    if name == "ema" and saved_value is None:  # a new average starts at the weights, and the banner reports it
        return ""
    return "" if saved_value == current_value else f"was {_shorten(saved_value)}, is {_shorten(current_value)}"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
