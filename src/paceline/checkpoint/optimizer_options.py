"""The optimizer options that the job's factory sets. They are recorded, so that a resume finds a changed option.

A checkpoint has the options as the schedule has changed them, so it can't show a change by the user. A resume compares
the factory's options with those at the start of the run. A changed option that the user accepts applies from the next
step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint.state_json import decode_state, encode_state, normalize_numbers, unwritable_kind

KERNEL_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})  # they do not change the result
_IGNORED_KEYS = {"params", "param_names", *KERNEL_OPTIONS}

Options = list[list[dict[str, Any]]]  # the options by optimizer and parameter group


def factory_options(optimizers: Sequence[Optimizer]) -> Options:
    """Return the options of new optimizers, as the factory has set them, as JSON per optimizer and group."""
    return [[current_options(group) for group in optimizer.param_groups] for optimizer in optimizers]


def current_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current options of a group, as JSON."""
    options: dict[str, Any] = encode_state({k: v for k, v in group.items() if k not in _IGNORED_KEYS}, where="a group")
    return options


def optimizer_difference(saved: Any, current: Sequence[Mapping[str, Any]]) -> str:
    """Return text on how two descriptions of optimizers differ, or an empty string if they do not."""
    saved = saved or []
    kinds_and_sizes = [[(o["kind"], o["groups"]) for o in optimizers] for optimizers in (saved, current)]
    if kinds_and_sizes[0] != kinds_and_sizes[1]:
        return f"was {_describe_groups(saved)}, is {_describe_groups(current)}"
    name_changes = [_describe_name_changes(before, after) for before, after in zip(saved, current, strict=True)]
    if any(name_changes):
        return "; ".join(text for text in name_changes if text)
    groups_by_change: dict[str, list[int]] = {}
    for saved_optimizer, optimizer in zip(saved, current, strict=True):
        for group, (old, new) in enumerate(
            zip(saved_optimizer.get("options", optimizer["options"]), optimizer["options"], strict=True)
        ):
            for key in changed_keys(old, new):
                groups_by_change.setdefault(
                    f"{key} was {_format_option(old, key)}, is {_format_option(new, key)}", []
                ).append(group)
    num_groups = sum(len(o["groups"]) for o in current)
    return "; ".join(
        text if len(groups) == num_groups else f"{text} (group {', '.join(map(str, groups))})"
        for text, groups in groups_by_change.items()
    )


def changed_keys(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the options that differ. An option that JSON can't hold is compared only if both mappings have it."""
    return [key for key in {**saved, **current} if not _is_same(key, saved, current)]


def job_controlled_options(
    group: Mapping[str, Any], *, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> set[str]:
    """Return the options of a group that a resume does not load: the job has changed them, or a schedule sets them."""
    return {*changed_keys(saved, current), *changed_keys(current, current_options(group))}


def _is_same(key: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    if key in saved and key in current:
        return bool(normalize_numbers(saved[key]) == normalize_numbers(current[key]))
    return bool(
        unwritable_kind((saved if key in saved else current)[key])
    )  # earlier versions did not record such an option


def _describe_name_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return text on the parameters that a group gained or lost while its size stayed the same."""
    pairs = zip(saved.get("names") or current["names"], current["names"], strict=True)
    for group, (before, after) in enumerate(pairs):
        removed, added = [name for name in before if name not in after], [name for name in after if name not in before]
        if removed or added:
            return f"group {group} of {current['kind']} had {', '.join(removed[:3])}, has {', '.join(added[:3])}"
    return ""


def _describe_groups(optimizers: Sequence[Mapping[str, Any]]) -> str:
    return (
        ", ".join(
            f"{o['kind']} of {len(o['groups'])} groups ({', '.join(map(str, o['groups']))} parameters)"
            for o in optimizers
        )
        or "none"
    )


def _format_option(options: Mapping[str, Any], key: str) -> str:
    if key not in options:
        return "absent"
    value = normalize_numbers(options[key]) if unwritable_kind(options[key]) else decode_state(options[key])
    return str(value)
