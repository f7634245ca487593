"""The options that the job's factory gives its optimizers: recorded, so that a changed one is not overruled in silence.

What a checkpoint restores are the groups as the schedule has moved them. So what the factory gives now is compared
with what it gave when the run began, and one that was changed, and accepted, holds from the next step on.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from paceline.train.plain import from_plain, to_plain, without_anew

KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})  # how it is computed, not what
_NO_OPTIONS = {"params", "param_names", *KERNELS}

Options = list[list[dict[str, Any]]]


def given_options(optimizers: Sequence[Optimizer]) -> Options:
    """For each optimizer, for each group, what the factory says, as JSON."""
    return [
        [
            without_anew(to_plain({k: v for k, v in group.items() if k not in _NO_OPTIONS}, where="a parameter group"))
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def optimizer_difference(saved: Any, now: Sequence[Mapping[str, Any]]) -> str:
    """In words, or nothing where they are the same."""
    saved = saved or []
    shapes = [[(o["kind"], o["groups"]) for o in each] for each in (saved, now)]
    if shapes[0] != shapes[1]:
        return f"was {_shape(saved)}, is {_shape(now)}"
    told: dict[str, list[int]] = {}
    for was, has in zip(saved, now, strict=True):
        for group, (old, new) in enumerate(zip(was.get("options", has["options"]), has["options"], strict=True)):
            for key in changed_keys(old, new):
                told.setdefault(f"{key} was {_shown(old, key)}, is {_shown(new, key)}", []).append(group)
    most = sum(len(o["groups"]) for o in now)
    return "; ".join(
        text if len(groups) == most else f"{text} (group {', '.join(map(str, groups))})"
        for text, groups in told.items()
    )


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The options that are not the same."""
    return [key for key in {**old, **new} if key not in old or key not in new or old[key] != new[key]]


def replay(schedule: Any, *, steps: int) -> None:
    """Take a new schedule to where the run stands, from the options as they are now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer has stepped here
        for _ in range(steps):
            schedule.step()


def kept_now(group: Mapping[str, Any], *, then: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """The options of a group that hold as the job gives them: changed ones, and those that its schedule moves."""
    present = to_plain({k: v for k, v in group.items() if k not in _NO_OPTIONS}, where="a parameter group")
    return {*changed_keys(then, now), *changed_keys(now, present)}


def _shape(optimizers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{o['kind']} of {len(o['groups'])} groups {o['groups']}" for o in optimizers) or "none"


def _shown(options: Mapping[str, Any], key: str) -> str:
    return str(from_plain(options[key])) if key in options else "absent"
