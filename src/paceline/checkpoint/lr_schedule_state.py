"""Learning rate schedules of the job: recorded at the start, compared on a resume, advanced to a step.

A schedule's `state_dict` holds its settings (`T_max`, `milestones`) as well as its position. Loading it into a changed
schedule would undo the change. So a run records its schedules before the first step, and a resume compares them.
"""

import hashlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from paceline.checkpoint.optimizer_options import Options, changed_keys, current_options, optimizer_difference
from paceline.checkpoint.state_json import (
    decode_state,
    encode_state,
    normalize_numbers,
    remove_unwritable_values,
    unwritable_kind,
)
from paceline.errors import CheckpointError
from paceline.step.optimizer_update import lr_scheduler_error, step_lr_scheduler

_POSITION_KEYS = frozenset(
    {"base_lrs", "_last_lr", "_step_count", "_get_lr_called_within_step", "_is_initial", "verbose"}
)
# Not compared if the saved description comes from `describe_saved_schedules`.
_COUNTER_KEYS = frozenset({"last_epoch", "T_cur", "T_i"})
_INNER_SCHEDULES = "_schedulers"
_SCHEDULED_OPTIONS = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas"}
)
_MAX_DEPTH = 3
_MAX_CHANGES = 3
_MAX_TEXT = 4096

Description = Mapping[str, Any]


def describe_schedules(
    schedules: Sequence[Any], optimizers: Sequence[Optimizer], factory_options: Options
) -> list[dict[str, Any]]:
    """Describe the job's schedules before any step: classes, settings, functions, and options written to groups."""
    pairs = zip(schedules, optimizers, factory_options, strict=False)
    return [_describe(s) | {"groups": _written_options(optimizer, options)} for s, optimizer, options in pairs]


def describe_saved_schedules(schedules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Describe the schedules of a checkpoint that has no description, from their saved `state_dict`."""
    return [_describe_saved(state) for state in schedules]


def schedule_difference(saved: Sequence[Description], current: Sequence[Description], *, lr_differs: bool) -> str:
    """Return text on how two descriptions of schedules differ, or an empty string if they do not.

    `lr_differs` means that the optimizers themselves differ in an option that schedules set. Then the learning rates,
    momenta and betas that the schedules have written to the parameter groups are not reported.
    """
    kinds = [[schedule.get("kind") or "a schedule" for schedule in schedules] for schedules in (saved, current)]
    pairs = list(zip(saved, current, strict=False))
    if len(saved) != len(current) or any(before.get("kind") not in (None, after["kind"]) for before, after in pairs):
        return f"was {', '.join(kinds[0]) or 'none'}, is {', '.join(kinds[1]) or 'none'}"
    changes: dict[str, None] = {}
    for saved_schedule, current_schedule in pairs:
        changes |= dict.fromkeys(_describe_differences(saved_schedule, current_schedule, lr_differs=lr_differs))
    # private attributes are derived from settings
    public_changes = [text for text in changes if "._" not in text] or list(changes)
    suffix = f" and {len(public_changes) - _MAX_CHANGES} more" if len(public_changes) > _MAX_CHANGES else ""
    return "; ".join(text.replace("._", ".") for text in public_changes[:_MAX_CHANGES]) + suffix


def has_other_lr(saved: Any, current: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether two descriptions of optimizers differ in an option that schedules set, such as `lr` or `betas`.

    Optimizers of other kinds, or with other parameters, count as different.
    """
    saved = saved or []
    shapes = [[(o["kind"], o["groups"], o.get("names")) for o in optimizers] for optimizers in (saved, current)]
    if shapes[0] != shapes[1] or not all("options" in optimizer for optimizer in saved):
        return bool(optimizer_difference(saved, current))
    return any(
        scheduled_options(dict.fromkeys(changed_keys(old, new)))
        for saved_optimizer, optimizer in zip(saved, current, strict=True)
        for old, new in zip(saved_optimizer["options"], optimizer["options"], strict=True)
    )


def changed_schedules(saved: Sequence[Description], current: Sequence[Description]) -> list[bool]:
    """Return for each of the job's schedules whether it differs from the schedule with which the run began."""
    is_changed = [
        bool(schedule_difference([before], [after], lr_differs=False))
        for before, after in zip(saved, current, strict=False)
    ]
    return is_changed + [True] * (len(current) - len(is_changed))


def scheduled_options(group: Mapping[str, Any]) -> set[str]:
    """Return the options of a group that schedules set. Their saved values do not suit a different schedule."""
    return set(group) & _SCHEDULED_OPTIONS


def load_schedule(schedule: Any, saved: Mapping[str, Any]) -> None:
    """Load a schedule's saved state. Values that a checkpoint can't hold stay as the job has created them."""
    schedule.load_state_dict({**schedule.state_dict(), **decode_state(remove_unwritable_values(saved))})


def advance_schedule(schedule: Any, *, steps: int) -> None:
    """Advance a new schedule by the run's `steps` so far, starting from the current options.

    Raises:
        JobError: the schedule ends earlier.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, because no optimizer has stepped
        for _ in range(steps):
            step_lr_scheduler(schedule)


def refuse_short_schedules(schedules: Sequence[Any], *, total_steps: int | None) -> None:
    """Raise an error for a schedule that has fewer steps than the run.

    Raises:
        JobError: a schedule is too short; the message has both numbers of steps.
    """
    for schedule in schedules:
        max_steps = schedule_length(schedule)
        if total_steps is not None and max_steps is not None and max_steps < total_steps:
            raise lr_scheduler_error(schedule, cause=f"it has {max_steps:,} steps, but the run has {total_steps:,}")


def schedule_length(schedule: Any) -> int | None:
    """Return the number of steps that a torch schedule can make before it raises an error; None if it never does."""
    inner_schedules = getattr(schedule, _INNER_SCHEDULES, None)
    if inner_schedules is None:
        return int(schedule.total_steps) if isinstance(schedule, OneCycleLR) else None
    begins = [0, *getattr(schedule, "_milestones", [0] * (len(inner_schedules) - 1))]
    ends = [*begins[1:], None] if hasattr(schedule, "_milestones") else [None] * len(inner_schedules)
    limits = []
    for inner, begin, end in zip(inner_schedules, begins, ends, strict=False):
        max_steps = schedule_length(inner)
        if max_steps is not None and (end is None or begin + max_steps < end - 1):
            limits.append(begin + max_steps)
    return min(limits, default=None)


def _describe(schedule: Any) -> dict[str, Any]:
    """Describe one schedule: its class, settings, functions and inner schedules."""
    state = {k: v for k, v in schedule.state_dict().items() if k not in {*_POSITION_KEYS, _INNER_SCHEDULES}}
    schedule_type = type(schedule)
    return {
        "kind": schedule_type.__name__,
        "state": remove_unwritable_values(encode_state(state, where=schedule_type.__name__, store=_digest_tensor)),
        "functions": _describe_functions(schedule),
        "inner": [_describe(inner) for inner in getattr(schedule, _INNER_SCHEDULES, ())],
    }


def _describe_saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a schedule by its saved settings alone: its class and functions are not known."""
    settings = {k: v for k, v in state.items() if k not in {*_POSITION_KEYS, *_COUNTER_KEYS, _INNER_SCHEDULES}}
    inner = state.get(_INNER_SCHEDULES) or []
    return {"state": settings, "inner": [_describe_saved(inner_state) for inner_state in inner]}


def _digest_tensor(tensor: Any) -> str:
    return hashlib.sha256(repr(tensor.detach().cpu().tolist()).encode()).hexdigest()


def _written_options(optimizer: Optimizer, factory_options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options that a schedule wrote to each group at its creation. Some, like `max_lr`, are only there."""
    written = []
    for group, options in zip(optimizer.param_groups, factory_options, strict=True):
        current = current_options(group)
        written.append(
            {key: current[key] for key in changed_keys(options, current) if key in current and key != "initial_lr"}
        )
    return written


def _describe_functions(schedule: Any) -> dict[str, Any]:
    """Describe the functions that a schedule stores and, for a class outside torch, also its methods."""
    descriptions: dict[str, Any] = {}
    for name, value in vars(schedule).items():
        items = value if isinstance(value, list | tuple) else [value]
        for index, item in enumerate(items):
            function = _describe_function(item)
            if function and name != "optimizer":
                descriptions[f"{name}[{index}]" if isinstance(value, list | tuple) else name] = function
    for schedule_type in reversed(type(schedule).__mro__):
        if not schedule_type.__module__.startswith("torch.") and schedule_type is not object:
            methods = {n: m for n, m in vars(schedule_type).items() if isinstance(m, FunctionType)}
            descriptions |= {
                f"{schedule_type.__name__}.{name}": _describe_function(method) for name, method in methods.items()
            }
    return descriptions


def _describe_function(value: Any, depth: int = 0) -> dict[str, Any]:
    """Return the values that a callable uses, by name, and a digest of its code.

    A callable is a function, a partial, a bound method, or an object with `__call__`. The result is empty for callables
    that torch defines or that have no Python code, for classes, and for other objects.
    """
    if isinstance(value, partial):
        arguments = {f"argument {index}": item for index, item in enumerate(value.args)} | value.keywords
        return {**_describe_function(value.func, depth), **_encode_values(arguments, depth)}
    if isinstance(value, MethodType):
        module = type(value.__self__).__module__
        return (
            {}
            if module.startswith("torch.")
            else {**_encode_values(vars(value.__self__), depth), **_describe_function(value.__func__)}
        )
    if not isinstance(value, FunctionType):
        call_method = next((vars(kind)["__call__"] for kind in type(value).__mro__ if "__call__" in vars(kind)), None)
        is_user_defined = (
            isinstance(call_method, FunctionType) and not isinstance(value, type) and not _is_from_torch(call_method)
        )
        return (
            {**_encode_values(getattr(value, "__dict__", {}), depth), **_describe_function(call_method, depth)}
            if is_user_defined
            else {}
        )
    if _is_from_torch(value):
        return {}
    code = value.__code__
    cells = dict(zip(code.co_freevars, _closure_values(value), strict=True))
    referenced_globals = {name: value.__globals__[name] for name in code.co_names if name in value.__globals__}
    # strings are left out: they may be paths
    global_values = {name: item for name, item in referenced_globals.items() if not isinstance(item, str)}
    defaults = value.__defaults__ or ()
    default_names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    default_values = dict(zip(default_names, defaults, strict=True)) | (value.__kwdefaults__ or {})
    values = _encode_values({**global_values, **default_values, **cells}, depth)
    return {**values, f"code in Python {sys.version_info.major}.{sys.version_info.minor}": _code_digest(code)}


def _is_from_torch(function: FunctionType) -> bool:
    return (function.__module__ or "").startswith("torch.")


def _closure_values(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            yield None


def _encode_values(values: Mapping[str, Any], depth: int) -> dict[str, Any]:
    encoded: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, FunctionType | partial):
            if depth < _MAX_DEPTH:
                encoded |= {f"{name}.{key}": inner for key, inner in _describe_function(value, depth + 1).items()}
            continue
        with suppress(CheckpointError, RecursionError):  # large tensors and cyclic objects are not settings
            encoded_value = encode_state(value, where=name)
            if not unwritable_kind(encoded_value) and len(repr(encoded_value)) <= _MAX_TEXT:
                encoded[name] = encoded_value
    return encoded


def _code_digest(code: CodeType) -> str:
    hasher = hashlib.sha256(code.co_code)
    for constant in code.co_consts:
        text = _code_digest(constant) if isinstance(constant, CodeType) else repr(constant)
        hasher.update(text.encode())
    hasher.update(repr(code.co_names).encode())
    return hasher.hexdigest()[:16]


def _describe_differences(saved: Description, current: Description, *, lr_differs: bool) -> Iterator[str]:
    kind, is_from_state_dict = current["kind"], saved.get("kind") is None  # see `_describe_saved`
    # A `state_dict` does not show the initial values of a schedule that contains user-defined functions or methods.
    if not (is_from_state_dict and current["functions"]):
        for key in changed_keys(saved["state"], current["state"]):
            is_in_both = key in saved["state"] and key in current["state"]
            if not (is_from_state_dict and key in _COUNTER_KEYS) and (is_in_both or not key.startswith("_")):
                yield _format_change(f"{kind}.{key}", saved["state"], current["state"], key)
    for name in {**saved.get("functions", {}), **current["functions"]} if not is_from_state_dict else ():
        yield from _function_differences(
            kind, name, saved["functions"].get(name, {}), current["functions"].get(name, {})
        )
    for group, (before, after) in enumerate(zip(saved.get("groups", []), current.get("groups", []), strict=False)):
        for key in changed_keys(before, after):
            if not (lr_differs and key in _SCHEDULED_OPTIONS):
                yield _format_change(f"group {group}: {key}", before, after, key)
    saved_inner, current_inner = saved.get("inner", []), current["inner"]
    if len(saved_inner) != len(current_inner) or any(
        a.get("kind") not in (None, b["kind"]) for a, b in zip(saved_inner, current_inner, strict=False)
    ):
        names = [", ".join(str(inner.get("kind")) for inner in side) for side in (saved_inner, current_inner)]
        yield f"{kind}: its schedules were {names[0]}, are {names[1]}"
        return
    for before, after in zip(saved_inner, current_inner, strict=True):
        yield from _describe_differences(before, after, lr_differs=lr_differs)


def _function_differences(kind: str, name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    code_keys = [{key for key in description if _is_code(key)} for description in (saved, current)]
    same_python = bool(code_keys[0] & code_keys[1]) or not (code_keys[0] and code_keys[1])
    changed_values = [key for key in changed_keys(saved, current) if not _is_code(key)]
    for key in changed_values:
        yield _format_change(f"{kind}.{name}: {key}", saved, current, key)
    if not changed_values and same_python and changed_keys(saved, current):
        yield f"{kind}.{name}: the function was changed"


def _is_code(key: str) -> bool:
    """Return whether this is the key of a code digest: `code in Python 3.12`."""
    return key.rpartition(".")[2].isdecimal() and "code in Python" in key


def _format_change(name: str, saved: Mapping[str, Any], current: Mapping[str, Any], key: str) -> str:
    shown = [_format_value(values[key]) if key in values else "absent" for values in (saved, current)]
    return f"{name} was {shown[0]}, is {shown[1]}"


def _format_value(value: Any) -> str:
    text = str(normalize_numbers(value) if unwritable_kind(value) else decode_state(value, fetch=lambda _: "a tensor"))  # type: ignore[arg-type,return-value]
    return text if len(text) <= 60 else text[:57] + "..."
