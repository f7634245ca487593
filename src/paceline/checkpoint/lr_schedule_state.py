"""Learning rate schedules of the job: recorded at the start, compared on a resume, advanced to a step.

A schedule's `state_dict` holds its settings (`T_max`, `milestones`) as well as its position. Loaded into a changed
schedule, it overrides the change. So a run records its schedules before the first step, and a resume compares.
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

from paceline.checkpoint.optimizer_options import Options, changed_keys, options_now
from paceline.checkpoint.state_json import (
    from_plain,
    job_created_kind,
    normalized_numbers,
    to_plain,
    without_job_created,
)
from paceline.errors import CheckpointError
from paceline.step.optimizer_update import move_on, schedule_error

_PLACE = frozenset({"base_lrs", "_last_lr", "_step_count", "_get_lr_called_within_step", "_is_initial", "verbose"})
_MOVES = frozenset({"last_epoch", "T_cur", "T_i"})  # of torch's schedules, for runs that did not record theirs
_INNER = "_schedulers"
_RATES = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas"})
_DEEPEST = 3
_MOST_SHOWN = 3
_MOST_TEXT = 4096

Description = Mapping[str, Any]


def describe_schedules(
    schedules: Sequence[Any], optimizers: Sequence[Optimizer], given: Options
) -> list[dict[str, Any]]:
    """Return the job's schedules before any step: classes, settings, functions, and options written to groups."""
    pairs = zip(schedules, optimizers, given, strict=False)
    return [_described(s) | {"groups": _written(optimizer, options)} for s, optimizer, options in pairs]


def describe_saved(schedules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what a checkpoint without such a record tells about its schedules: their position, not their start."""
    return [_described_saved(state) for state in schedules]


def schedule_difference(saved: Sequence[Description], now: Sequence[Description], *, lr_differs: bool) -> str:
    """Return in words how the schedules differ, or an empty string if they are the same.

    If the job gives other rates (`lr_differs`), the values that a schedule derives from them are no difference of its
    own.
    """
    kinds = [[one.get("kind") or "a schedule" for one in each] for each in (saved, now)]
    pairs = list(zip(saved, now, strict=False))
    if len(saved) != len(now) or any(one.get("kind") not in (None, has["kind"]) for one, has in pairs):
        return f"was {', '.join(kinds[0]) or 'none'}, is {', '.join(kinds[1]) or 'none'}"
    found: dict[str, None] = {}
    for was, has in pairs:
        found |= dict.fromkeys(_differences(was, has, lr_differs=lr_differs))
    told = [text for text in found if "._" not in text] or list(found)  # what torch derives from a setting is private
    more = f" and {len(told) - _MOST_SHOWN} more" if len(told) > _MOST_SHOWN else ""
    return "; ".join(text.replace("._", ".") for text in told[:_MOST_SHOWN]) + more


def changed_schedules(saved: Sequence[Description], now: Sequence[Description]) -> list[bool]:
    """Return for each of the job's schedules whether it differs from the one that the run began with."""
    found = [bool(schedule_difference([was], [has], lr_differs=False)) for was, has in zip(saved, now, strict=False)]
    return found + [True] * (len(now) - len(found))


def moved_options(group: Mapping[str, Any]) -> set[str]:
    """Return the options of a group that schedules change: under another schedule the saved values mean nothing."""
    return set(group) & _RATES


def load_schedule(schedule: Any, plain: Mapping[str, Any]) -> None:
    """Load a schedule's saved state; values that can't be written stay as the job makes them."""
    schedule.load_state_dict({**schedule.state_dict(), **from_plain(without_job_created(plain))})


def replay(schedule: Any, *, steps: int) -> None:
    """Advance a new schedule to the run's step, starting from the current options.

    Raises:
        JobError: it does not go as far.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer has stepped here
        for _ in range(steps):
            move_on(schedule)


def refuse_short(schedules: Sequence[Any], *, total_steps: int | None) -> None:
    """Raise an error for a schedule that can't be stepped as often as the run is long.

    Raises:
        JobError: with both numbers.
    """
    for schedule in schedules:
        most = last_step(schedule)
        if total_steps is not None and most is not None and most < total_steps:
            raise schedule_error(schedule, cause=f"it has {most:,} steps, but the run has {total_steps:,}")


def last_step(schedule: Any) -> int | None:
    """Return the number of steps after which torch's schedule raises an error; None if it never does."""
    inner = getattr(schedule, _INNER, None)
    if inner is None:
        return int(schedule.total_steps) if isinstance(schedule, OneCycleLR) else None
    begins = [0, *getattr(schedule, "_milestones", [0] * (len(inner) - 1))]
    ends = [*begins[1:], None] if hasattr(schedule, "_milestones") else [None] * len(inner)
    found = []
    for one, begin, end in zip(inner, begins, ends, strict=False):
        most = last_step(one)
        if most is not None and (end is None or begin + most < end - 1):
            found.append(begin + most)
    return min(found, default=None)


def _described(schedule: Any) -> dict[str, Any]:
    state = {k: v for k, v in schedule.state_dict().items() if k not in {*_PLACE, _INNER}}
    kind = type(schedule)
    return {
        "kind": kind.__name__,
        "state": without_job_created(to_plain(state, where=kind.__name__, keep=_digest)),
        "functions": _functions(schedule),
        "inner": [_described(one) for one in getattr(schedule, _INNER, ())],
    }


def _described_saved(state: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in state.items() if k not in {*_PLACE, *_MOVES, _INNER}}
    inner = state.get(_INNER) or []
    return {"state": kept, "inner": [_described_saved(one) for one in inner]}


def _digest(tensor: Any) -> str:
    return hashlib.sha256(repr(tensor.detach().cpu().tolist()).encode()).hexdigest()


def _written(optimizer: Optimizer, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options that a schedule wrote to the groups when it was created: `max_lr` is stored nowhere else."""
    found = []
    for group, options in zip(optimizer.param_groups, given, strict=True):
        now = options_now(group)
        found.append({key: now[key] for key in changed_keys(options, now) if key in now and key != "initial_lr"})
    return found


def _functions(schedule: Any) -> dict[str, Any]:
    """Return the values that its functions compute with and, for a class that is not torch's, its methods' code."""
    found: dict[str, Any] = {}
    for name, value in vars(schedule).items():
        items = value if isinstance(value, list | tuple) else [value]
        for place, item in enumerate(items):
            function = _function(item)
            if function and name != "optimizer":
                found[f"{name}[{place}]" if isinstance(value, list | tuple) else name] = function
    for kind in reversed(type(schedule).__mro__):
        if not kind.__module__.startswith("torch.") and kind is not object:
            methods = {n: m for n, m in vars(kind).items() if isinstance(m, FunctionType)}
            found |= {f"{kind.__name__}.{name}": _function(method) for name, method in methods.items()}
    return found


def _function(value: Any, depth: int = 0) -> dict[str, Any]:
    """Return the values that a function computes with, by name, and a digest of its code; empty for other objects."""
    if isinstance(value, partial):
        bound = {f"argument {place}": item for place, item in enumerate(value.args)} | value.keywords
        return {**_function(value.func, depth), **_values(bound, depth)}
    if isinstance(value, MethodType):
        module = type(value.__self__).__module__
        return (
            {} if module.startswith("torch.") else {**_values(vars(value.__self__), depth), **_function(value.__func__)}
        )
    if not isinstance(value, FunctionType):
        own = next((vars(kind)["__call__"] for kind in type(value).__mro__ if "__call__" in vars(kind)), None)
        is_own = isinstance(own, FunctionType) and not isinstance(value, type) and not _is_torch_s(own)
        return {**_values(getattr(value, "__dict__", {}), depth), **_function(own, depth)} if is_own else {}
    if _is_torch_s(value):
        return {}
    code = value.__code__
    cells = dict(zip(code.co_freevars, _contents(value), strict=True))
    known = {name: value.__globals__[name] for name in code.co_names if name in value.__globals__}
    used = {name: item for name, item in known.items() if not isinstance(item, str)}  # such as folders
    defaults = value.__defaults__ or ()
    named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    given = dict(zip(named, defaults, strict=True)) | (value.__kwdefaults__ or {})
    found = _values({**used, **given, **cells}, depth)
    return {**found, f"code in Python {sys.version_info.major}.{sys.version_info.minor}": _code_digest(code)}


def _is_torch_s(function: FunctionType) -> bool:
    return (function.__module__ or "").startswith("torch.")


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            yield None


def _values(named: Mapping[str, Any], depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in named.items():
        if isinstance(value, FunctionType | partial):
            if depth < _DEEPEST:
                found |= {f"{name}.{key}": one for key, one in _function(value, depth + 1).items()}
            continue
        with suppress(CheckpointError, RecursionError):  # large tensors, and what holds itself, are no settings
            plain = to_plain(value, where=name)
            if not job_created_kind(plain) and len(repr(plain)) <= _MOST_TEXT:
                found[name] = plain
    return found


def _code_digest(code: CodeType) -> str:
    found = hashlib.sha256(code.co_code)
    for constant in code.co_consts:
        text = _code_digest(constant) if isinstance(constant, CodeType) else repr(constant)
        found.update(text.encode())
    found.update(repr(code.co_names).encode())
    return found.hexdigest()[:16]


def _differences(was: Description, has: Description, *, lr_differs: bool) -> Iterator[str]:
    kind, old = has["kind"], was.get("kind") is None
    if not (old and has["functions"]):  # where a class of the job's own stood is not known
        for key in changed_keys(was["state"], has["state"]):
            both = key in was["state"] and key in has["state"]
            if not (old and key in _MOVES) and (both or not key.startswith("_")):
                yield _words(f"{kind}.{key}", was["state"], has["state"], key)
    for name in {**was.get("functions", {}), **has["functions"]} if not old else ():
        yield from _function_differences(kind, name, was["functions"].get(name, {}), has["functions"].get(name, {}))
    for group, (before, after) in enumerate(zip(was.get("groups", []), has.get("groups", []), strict=False)):
        for key in changed_keys(before, after):
            if not (lr_differs and key in _RATES):
                yield _words(f"group {group}: {key}", before, after, key)
    inner, now = was.get("inner", []), has["inner"]
    if len(inner) != len(now) or any(a.get("kind") not in (None, b["kind"]) for a, b in zip(inner, now, strict=False)):
        names = [", ".join(str(one.get("kind")) for one in each) for each in (inner, now)]
        yield f"{kind} was over {names[0]}, is over {names[1]}"
        return
    for before, after in zip(inner, now, strict=True):
        yield from _differences(before, after, lr_differs=lr_differs)


def _function_differences(kind: str, name: str, was: Mapping[str, Any], has: Mapping[str, Any]) -> Iterator[str]:
    codes = [{key for key in one if _is_code(key)} for one in (was, has)]
    same_python = bool(codes[0] & codes[1]) or not (codes[0] and codes[1])
    values = [key for key in changed_keys(was, has) if not _is_code(key)]
    for key in values:
        yield _words(f"{kind}.{name}: {key}", was, has, key)
    if not values and same_python and changed_keys(was, has):
        yield f"{kind}.{name}: the function was changed"


def _is_code(key: str) -> bool:
    return key.rpartition(".")[2].isdecimal() and "code in Python" in key


def _words(what: str, was: Mapping[str, Any], has: Mapping[str, Any], key: str) -> str:
    shown = [_shown(one[key]) if key in one else "absent" for one in (was, has)]
    return f"{what} was {shown[0]}, is {shown[1]}"


def _shown(value: Any) -> str:
    text = str(normalized_numbers(value) if job_created_kind(value) else from_plain(value, find=lambda _: "a tensor"))  # type: ignore[arg-type,return-value]
    return text if len(text) <= 60 else text[:57] + "..."
