"""What must not have changed for a run to be gone on with."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ResumeError
from paceline.start import EXACT_KERNELS
from paceline.train.options import optimizer_difference
from paceline.train.schedules import schedule_difference

_BEFORE = {"update": "sync", "compress": "none"}  # of runs that did not say
_LATER = frozenset({"max_grad_norm", "ema"})  # which earlier runs did not record
_CAUSE = "another setting, another job file, or other data"


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], *, allow: Sequence[str]) -> None:
    """Refuse a resume that would be another run.

    Exact mode is computed by other kernels: where it or they may change, so may the last bits of data that a job
    computes. Kernels are part of a run where it is exact before and after, and its checkpoint names them.

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
        cause, hint = _CAUSE, f"--allow {','.join(changed)} to go on all the same"
        if changed == ["kernels"]:
            cause = f"another {EXACT_KERNELS} in the environment, and with it other last bits"
            hint = f"{EXACT_KERNELS}={saved['kernels']} before the same command, or {hint}"
        raise ResumeError(f"this is not the run that was saved: {'; '.join(lines)}.", cause=cause, hint=hint)


def _difference(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    was, has = saved.get(name, _BEFORE.get(name)), now[name]
    if name == "optimizer":
        return optimizer_difference(was, has)
    if name == "schedule":
        differs = bool(optimizer_difference(saved.get("optimizer"), now["optimizer"]))
        return schedule_difference(was, has, lr_differs=differs)
    if name == "ema" and was is None:  # one that is added begins at the weights, and stands in the banner
        return ""
    return "" if was == has else f"was {_short(was)}, is {_short(has)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
