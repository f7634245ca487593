"""A tensor plan as a small TOML file that a user reads and edits."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from torch import nn

from paceline.config.text_file import given_text
from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError, raise_all
from paceline.parallel.tensor_parallel.tensor_plan import KINDS, ParameterRole, TensorPlan, unknown_names

HEADING = """\
# Which weights are cut over the tensor-parallel ranks. A name is a module's (or a parameter's); * is one name between
# dots, ** any number of them. What is not named stays whole.
# column: outputs cut. row: inputs cut. embedding, head: the vocabulary cut. whole. local: runs on its pieces (experts).
# fused: this number of projections one after another, sections: of these sizes, heads: must divide by the ranks.
"""
FIELDS = {"role": str, "fused": int, "heads": int, "dim": int, "sections": list}


def write_plan(plan: TensorPlan, *, path: Path) -> None:
    """Write the plan to `path`, atomically by way of a temporary file."""
    lines = [HEADING, *(f"# {note}\n" for note in plan.notes), "\n[roles]\n"]
    lines += [f"{json.dumps(name)} = {_value(role)}\n" for name, role in plan.roles.items()]
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _value(role: ParameterRole) -> str:
    more = {"fused": role.fused if role.fused != 1 else None, "sections": list(role.sections) or None,
            "heads": role.heads, "dim": role.dim}  # fmt: skip
    said = {key: value for key, value in more.items() if value is not None}
    if not said:
        return json.dumps(role.kind)
    return (
        "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in [("role", role.kind), *said.items()]) + " }"
    )


def read_plan(path: Path, *, model: nn.Module | None = None) -> TensorPlan:
    """Read a plan file.

    With `model`, names in a faulty file are checked too, so that all problems are reported at once.

    Raises:
        UsageError: with the file and line; several at once are raised as `Problems`.
    """
    try:
        text = given_text(path, what="a tensor plan", hint='[roles], and below it "layers.*.up" = "column"')
        table = tomllib.loads(text)
    except FileNotFoundError:
        raise UsageError(
            f"there is no tensor plan {path}.", hint="leave --place.tensor_plan out: the plan is derived"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"the tensor plan is not TOML: {error}.", where=str(path), hint='"layers.*.up" = "column"'
        ) from None
    problems: list[PacelineError] = [
        UsageError(
            f"unknown table or key {key!r}; a tensor plan has [roles] alone.",
            where=_where(path, text, key),
            cause=did_you_mean(key, ["roles"]),
            hint="[roles], and below it one line per name",
        )
        for key in table
        if key != "roles"
    ]
    roles: dict[str, ParameterRole] = {}
    for name, value in table.get("roles", {}).items():
        wrong = _wrong(value)
        if wrong:
            problems.append(
                UsageError(
                    f"{name}: {wrong}", where=_where(path, text, name), hint=f'"{name}" = "column", or another role'
                )
            )
        else:
            given = {"role": value} if isinstance(value, str) else dict(value)
            sections = tuple(given.pop("sections", ()))
            kind: Any = given.pop("role")
            roles[name] = ParameterRole(kind=kind, sections=sections, **given)
    if not roles and not problems:
        problems.append(
            UsageError(
                "the tensor plan names no module.",
                where=str(path),
                cause="[roles] is empty or missing",
                hint='"layers.*.up" = "column"; or leave --place.tensor_plan out',
            )
        )
    if problems and model is not None:
        given = {name: v.get("role") if isinstance(v, dict) else v for name, v in table.get("roles", {}).items()}
        problems += unknown_names(model, given)
    raise_all(problems)
    return TensorPlan(roles=roles, source=str(path))


def _wrong(value: Any) -> str:
    given = {"role": value} if isinstance(value, str) else value
    if not isinstance(given, dict) or "role" not in given:
        return f"a role, or {{ role = ... }}, is expected, got {value!r}."
    for key, inner in given.items():
        if key not in FIELDS:
            return f"unknown key {key!r}; there are {', '.join(FIELDS)}."
        if not isinstance(inner, FIELDS[key]) or isinstance(inner, bool):
            return f"{key} = {inner!r} is not {FIELDS[key].__name__}."
        if key != "dim" and isinstance(inner, int) and inner < 1:
            return f"{key} = {inner!r} is not positive."
    if given["role"] not in KINDS:
        return f"unknown role {given['role']!r}; there are {', '.join(KINDS)}."
    if any(not isinstance(n, int) or n < 1 for n in given.get("sections", [])):
        return "sections are sizes."
    return ""


def _where(path: Path, text: str, key: str) -> str:
    """Return the place of the first line that begins with the key, quoted or not."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().lstrip("[\"'").startswith(key):
            return f"{path}:{number}"
    return str(path)
