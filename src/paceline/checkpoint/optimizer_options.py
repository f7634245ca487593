"""Optimizer options set by the job's factory: recorded, so that a changed one is not silently overridden.

A checkpoint restores the groups with the values that the schedule has set. So the factory's current options are
compared with those at the start of the run, and one that was changed, and accepted, holds from the next step on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint.state_json import from_plain, job_created_kind, normalized_numbers, to_plain

KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})  # how it is computed, not what
_NO_OPTIONS = {"params", "param_names", *KERNELS}

Options = list[list[dict[str, Any]]]


def given_options(optimizers: Sequence[Optimizer]) -> Options:
    """Return the factory's options as JSON, per optimizer and group."""
    return [[options_now(group) for group in optimizer.param_groups] for optimizer in optimizers]


def options_now(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current options of a group, as JSON."""
    found: dict[str, Any] = to_plain({k: v for k, v in group.items() if k not in _NO_OPTIONS}, where="a group")
    return found


def optimizer_difference(saved: Any, now: Sequence[Mapping[str, Any]]) -> str:
    """Return the difference in words, or an empty string if the optimizers are the same."""
    saved = saved or []
    shapes = [[(o["kind"], o["groups"]) for o in each] for each in (saved, now)]
    if shapes[0] != shapes[1]:
        return f"was {_shape(saved)}, is {_shape(now)}"
    others = [_other_names(was, has) for was, has in zip(saved, now, strict=True)]
    if any(others):
        return "; ".join(text for text in others if text)
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
    """Return the options that differ. One that can't be written is compared only if both sides name it."""
    return [key for key in {**old, **new} if not _is_same(key, old, new)]


def kept_now(group: Mapping[str, Any], *, then: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the options of a group that keep the job's values: changed ones, and those that its schedule sets."""
    return {*changed_keys(then, now), *changed_keys(now, options_now(group))}


def _is_same(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if key in old and key in new:
        return bool(normalized_numbers(old[key]) == normalized_numbers(new[key]))
    return bool(job_created_kind((old if key in old else new)[key]))  # earlier checkpoints do not record it


def _other_names(was: Mapping[str, Any], has: Mapping[str, Any]) -> str:
    """Return in words which parameters a group gained or lost; groups of equal size may hold other ones."""
    pairs = zip(was.get("names") or has["names"], has["names"], strict=True)
    for group, (before, after) in enumerate(pairs):
        gone, come = [name for name in before if name not in after], [name for name in after if name not in before]
        if gone or come:
            return f"group {group} of {has['kind']} held {', '.join(gone[:3])}, holds {', '.join(come[:3])}"
    return ""


def _shape(optimizers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{o['kind']} of {len(o['groups'])} groups {o['groups']}" for o in optimizers) or "none"


def _shown(options: Mapping[str, Any], key: str) -> str:
    if key not in options:
        return "absent"
    known = normalized_numbers(options[key]) if job_created_kind(options[key]) else from_plain(options[key])
    return str(known)
