"""Read and write a tensor plan as a small TOML file that users can edit."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from torch import nn

from paceline.config.text_file import read_user_text
from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError, raise_all
from paceline.parallel.tensor_parallel.tensor_plan import KINDS, ParameterRole, TensorPlan, unknown_names

HEADING = """\
# The weights that are sharded over the tensor-parallel ranks, by the name of a module or a parameter; * matches one
# name between dots, ** any number of them. All other weights stay whole.
# column: outputs sharded. row: inputs sharded. embedding, head: vocabulary sharded. whole: not sharded. local: the
# module runs on its shards (experts).
# fused: number of concatenated projections. sections: their sizes. heads: number of attention heads, which tp must
# divide. dim: the dimension of the weight that is sharded.
"""
FIELDS = {"role": str, "fused": int, "heads": int, "dim": int, "sections": list}


def write_plan(plan: TensorPlan, *, path: Path) -> None:
    """Write the plan to `path`, atomically by way of a temporary file."""
    lines = [HEADING, *(f"# {note}\n" for note in plan.notes), "\n[roles]\n"]
    lines += [f"{json.dumps(name)} = {_value(role)}\n" for name, role in plan.roles.items()]
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _value(role: ParameterRole) -> str:
    """Return a role as a TOML value: its kind as a string, or a table if it has other fields besides `kind`."""
    optional = {"fused": role.fused if role.fused != 1 else None, "sections": list(role.sections) or None,
            "heads": role.heads, "dim": role.dim}  # fmt: skip
    present = {key: value for key, value in optional.items() if value is not None}
    if not present:
        return json.dumps(role.kind)
    return (
        "{ "
        + ", ".join(f"{key} = {json.dumps(value)}" for key, value in [("role", role.kind), *present.items()])
        + " }"
    )


def read_plan(path: Path, *, model: nn.Module | None = None) -> TensorPlan:
    """Read a plan file.

    If the file has errors and `model` is given, the error also lists the names in the file that the model lacks. In a
    file without errors, the caller checks the names later.

    Raises:
        UsageError: the file is not a valid plan; the message gives the line. Several errors are raised as `Problems`.
    """
    try:
        text = read_user_text(path, expected="a tensor plan", hint='[roles], and below it "layers.*.up" = "column"')
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
            f"unknown table or key {key!r}; a tensor plan has only the table [roles].",
            where=_find_line(path, text, key),
            cause=did_you_mean(key, ["roles"]),
            hint="[roles], and below it one line per name",
        )
        for key in table
        if key != "roles"
    ]
    roles: dict[str, ParameterRole] = {}
    for name, value in table.get("roles", {}).items():
        problem = _find_problem(value)
        if problem:
            problems.append(
                UsageError(
                    f"{name}: {problem}",
                    where=_find_line(path, text, name),
                    hint=f'"{name}" = "column", or another role',
                )
            )
        else:
            entry = {"role": value} if isinstance(value, str) else dict(value)
            sections = tuple(entry.pop("sections", ()))
            kind: Any = entry.pop("role")
            roles[name] = ParameterRole(kind=kind, sections=sections, **entry)
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
        kind_by_name = {name: v.get("role") if isinstance(v, dict) else v for name, v in table.get("roles", {}).items()}
        problems += unknown_names(model, kind_by_name)
    raise_all(problems)
    return TensorPlan(roles=roles, source=str(path))


def _find_problem(value: Any) -> str:
    """Return a description of what is wrong with the value of a role; empty if the value is valid."""
    entry = {"role": value} if isinstance(value, str) else value
    if not isinstance(entry, dict) or "role" not in entry:
        return f"a role, or {{ role = ... }}, is expected, got {value!r}."
    for key, field_value in entry.items():
        if key not in FIELDS:
            return f"unknown key {key!r}; the keys are {', '.join(FIELDS)}."
        if not isinstance(field_value, FIELDS[key]) or isinstance(field_value, bool):
            return f"{key} = {field_value!r} is not {FIELDS[key].__name__}."
        if key != "dim" and isinstance(field_value, int) and field_value < 1:
            return f"{key} = {field_value!r} is not positive."
    if entry["role"] not in KINDS:
        return f"unknown role {entry['role']!r}; the roles are {', '.join(KINDS)}."
    if any(not isinstance(n, int) or n < 1 for n in entry.get("sections", [])):
        return "sections must be positive integers."
    return ""


def _find_line(path: Path, text: str, key: str) -> str:
    """Return path and line number of the first line that begins with the key, quoted or not."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().lstrip("[\"'").startswith(key):
            return f"{path}:{number}"
    return str(path)
