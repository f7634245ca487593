"""The reference of commands and settings as Markdown, made from the code each time the site is built."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from paceline.commands.command_table import VERBS
from paceline.commands.common.help_page import EXAMPLES, help_page
from paceline.config.merge_settings import default_value, known_settings, range_text
from paceline.config.settings import Settings


def commands() -> str:
    """Return a section for each command: what it does, how it is called, and a table of its options."""
    return "\n".join(_command(name) for name in VERBS)


def _command(name: str) -> str:
    verb = VERBS[name]
    texts, hints = _field_docstrings(verb.option_class()), get_type_hints(verb.option_class(), include_extras=True)
    positional = [field for field in fields(verb.option_class()) if _is_positional(hints[field.name])]
    named = [field for field in fields(verb.option_class()) if field not in positional]
    page = help_page(name, verb.option_class(), takes_settings=verb.takes_settings, takes_command=verb.takes_command)
    usage = page.partition("\n")[0]
    lines = [f"### `paceline {name}`", "", _cell(inspect.getdoc(verb.option_class()) or ""), ""]
    lines += ["```text", usage.removeprefix("usage: "), EXAMPLES[name], "```", ""]
    lines += ["| option | meaning | value | default |", "| --- | --- | --- | --- |"]
    for field in [*positional, *named]:
        flag = field.name.upper() if field in positional else f"--{field.name.replace('_', '-')}"
        kind = "flag" if bool in (hints[field.name], *get_args(hints[field.name])) else _kind(hints[field.name])
        cells = (f"`{flag}`", _cell(texts.get(field.name, "")), kind, _default(field))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def settings() -> str:
    """Return a section for each group of settings, with a table of names, values, defaults and ranges."""
    hints = get_type_hints(Settings)
    groups: dict[str, list[str]] = {}
    for name in known_settings():
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    lines: list[str] = []
    for group, names in groups.items():
        lines += [f"### `{group}`" if group else "### The run", ""]
        said = inspect.getdoc(hints[group]) if group else "Settings of the run as a whole."
        lines += [_cell(said or ""), "", "| setting | value | default | range |", "| --- | --- | --- | --- |"]
        for name in names:
            default = default_value(name)
            shown = "" if default in (None, (), "") else f"`{_shown(default)}`"
            lines.append(f"| `{name}` | {_kind(known_settings()[name])} | {shown} | {range_text(name)} |")
        lines.append("")
    return "\n".join(lines)


def _field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of its bases."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if owner.__module__.startswith("paceline."):
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
            for node, after in pairwise(body):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
                    found[node.target.id] = str(after.value.value)  # type: ignore[attr-defined]
    return found


def _is_positional(kind: Any) -> bool:
    return tyro.conf.Positional in _metadata(kind) or any("Positional" in repr(mark) for mark in _metadata(kind))


def _metadata(kind: Any) -> Iterable[Any]:
    return getattr(kind, "__metadata__", ())


def _kind(kind: Any) -> str:
    """Return a type in words that a user types."""
    if get_origin(kind) is Annotated:
        return _kind(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_kind(part) for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {_kind(get_args(kind)[0])}"
    return {bool: "`true`, `false`", int: "whole number", float: "number", Path: "path"}.get(kind, "text")


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required" if field.default_factory is MISSING else ""
    return "" if field.default in (None, "", (), False) else f"`{_shown(field.default)}`"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    """Return a text for one cell of a table; example option lines become code."""
    return re.sub(r"(?<![\w`-])(--[\w.-]+)", r"`\1`", " ".join(text.split())).replace("|", "\\|")
