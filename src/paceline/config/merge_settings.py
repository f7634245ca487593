"""Merge settings from defaults < job < file < command line, with each value's origin; report all problems at once."""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, time
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from paceline.config.secret_settings import is_mask
from paceline.config.settings import MAX_COUNT, Settings
from paceline.config.text_file import read_user_text
from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError, raise_all

JOB = "job"  # the group of the parameters of make_job, and the origin of settings in a `Job`
JOB_SETTINGS = "Job(settings=)"  # the same origin, as an error names it
COMMAND_LINE = "command line"
_MAX_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class RequestedSettings:
    """The requested values before merging: text or TOML values by dotted name, with their origin."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def layered_over(self, lower: Mapping[str, Any], *, origin: str, where: str = "") -> "RequestedSettings":
        """Return these values, and the values in `lower` of all settings that have none here.

        `lower` comes from Python code: from a job, or from the `settings=` of a function. `origin` is the origin of the
        values in `lower`. Errors name `where` instead, if it is given.

        Raises:
            UsageError, Problems: a name is unknown, a value has the wrong type, or a job that is already built gets a
                parameter.
        """
        problems: list[PacelineError] = []
        values = _read_layer(lower, where or origin, problems, is_job_built=True)
        raise_all(problems)
        return RequestedSettings(
            values={**values, **self.values}, origins={**dict.fromkeys(values, origin), **self.origins}
        )


@cache
def known_settings() -> Mapping[str, Any]:
    """Return the dotted name of every setting with its type."""
    return MappingProxyType(dict(_setting_types(Settings, "")))


def range_text(name: str) -> str:
    """Return the range of a numeric setting in words; an empty string if any value is allowed."""
    kind = known_settings()[name]
    bounds = next((m for part in (kind, *get_args(kind)) for m in getattr(part, "__metadata__", ())), None)
    if bounds is None:
        return ""
    maximum = f"{bounds.le:,.12g}" if bounds.le not in (None, MAX_COUNT) else ""
    if bounds.gt is not None:
        return f"above {bounds.gt}" + (f", at most {maximum}" if maximum else "")
    return f"{bounds.ge} to {maximum}" if maximum else f"{bounds.ge} or more"


def default_value(name: str) -> Any:
    """Return the default of one setting."""
    value: Any = Settings()
    for part in name.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def read_requested_settings(*, file: Path | None, overrides: Sequence[str]) -> RequestedSettings:
    """Read a TOML file and `--dotted.name value` words.

    Raises:
        UsageError, Problems: an unknown name, a value of the wrong type, a file that can't be read.
    """
    problems: list[PacelineError] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = [
        (f"file {file}", _from_file(file, problems)),
        (COMMAND_LINE, _from_arguments(overrides, problems)),
    ]
    for origin, tree in layers:
        layer = _read_layer(tree, origin, problems)
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    raise_all(problems)
    return RequestedSettings(values=values, origins=origins)


def merge_without_job(values: Mapping[str, Any]) -> Settings:
    """Return the settings of a command before its job is loaded: the parameters of the job are left out."""
    return merge(RequestedSettings(values={name: text for name, text in values.items() if not name.startswith("job.")}))


def merge(requested: RequestedSettings) -> Settings:
    """Return the typed settings: defaults, overridden by the requested values.

    Raises:
        UsageError, Problems: a setting has an invalid value.
    """
    problems = [
        _find_problem(name, value, requested.origins.get(name, ""), is_job_built=False)
        for name, value in requested.values.items()
    ]
    raise_all([problem for problem in problems if problem is not None])
    tree: dict[str, Any] = {}
    for name, value in requested.values.items():
        *path, leaf = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    try:
        return msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"a setting is not valid: {error}.", hint="docs/settings.md lists all") from None


def as_toml(requested: RequestedSettings) -> str:
    """Return the requested values as TOML, with origins as comments."""
    lines: list[str] = []
    for name in sorted(requested.values, key=lambda n: (n.count("."), n)):
        value = _toml_value(requested.values[name])
        origin = json.dumps(requested.origins.get(name, ""), ensure_ascii=False)[1:-1].replace("\x7f", "")
        lines.append(f"{name} = {value}  # {origin}")
    return "\n".join(lines) + "\n"


def _read_layer(
    tree: Mapping[str, Any], origin: str, problems: list[PacelineError], *, is_job_built: bool = False
) -> dict[str, Any]:
    """Return values by dotted name, normalized: text with commas becomes a list, a path becomes text."""
    values = {name: _normalize_value(name, value) for name, value in _flat_items(tree, "")}
    found_problems = [_find_problem(name, value, origin, is_job_built=is_job_built) for name, value in values.items()]
    problems += [problem for problem in found_problems if problem is not None]
    return values


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by their dotted names; names that are already dotted do not change."""
    return dict(_flat_items(tree, ""))


def settings_from_text(values: Mapping[str, str]) -> dict[str, Any]:
    """Return settings given as text: the text `5,6` of a list setting becomes a list, other text does not change."""
    return {name: _normalize_value(name, value) for name, value in values.items()}


def as_command_text(value: Any) -> str:
    """Return the value of a setting as text for the command line; the items of a list are joined by commas."""
    return ",".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def _normalize_value(name: str, value: Any) -> Any:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return _split_items(value) if isinstance(value, str) and _is_list_setting(name) else value


def _setting_types(cls: type, prefix: str) -> list[tuple[str, Any]]:
    settings: list[tuple[str, Any]] = []
    hints = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        name, kind = prefix + item.name, hints[item.name]
        settings += (
            _setting_types(kind, f"{name}.") if is_dataclass(kind) and isinstance(kind, type) else [(name, kind)]
        )
    return [entry for entry in settings if entry[0] != JOB]


def _from_file(file: Path | None, problems: list[PacelineError]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        tree = tomllib.loads(read_user_text(file, expected="a settings file", hint="[train], and below it steps = 100"))
    except FileNotFoundError:
        problems.append(UsageError(f"{file} does not exist.", hint="--config run.toml"))
        return {}
    except UsageError as error:
        problems.append(error)
        return {}
    except RecursionError:
        problems.append(UsageError(f"{file} is nested too deeply to be read.", hint='name = "value"'))
        return {}
    except tomllib.TOMLDecodeError as error:
        problems.append(UsageError(f"{file} can't be read: {error}.", where=str(file), hint='name = "value"'))
        return {}
    return tree


def _flat_items(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    values: list[tuple[str, Any]] = []
    for key, value in tree.items():
        is_group = isinstance(value, Mapping)
        values += _flat_items(value, f"{prefix}{key}.") if is_group else [(f"{prefix}{key}", value)]
    return values


def _from_arguments(arguments: Sequence[str], problems: list[PacelineError]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--") or len(argument) < 3:
            problems.append(UsageError(f"{argument!r} is not expected here.", hint="paceline --help"))
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if not equals:
            is_flag = not remaining or remaining[0].startswith("--")
            value = "true" if is_flag else remaining.pop(0)
        values[name] = value  # the last value wins, as scripts that end in "$@" expect
    return values


def _is_list_setting(name: str) -> bool:
    return get_origin(known_settings().get(name)) is tuple


def _split_items(text: str) -> list[str]:
    return [item for item in text.replace(" ", "").split(",") if item]


def _find_problem(name: str, value: Any, origin: str, *, is_job_built: bool) -> UsageError | None:
    if isinstance(value, date | time):  # datetime is a date
        return UsageError(
            f"{name} = {value.isoformat()} is a {type(value).__name__}, which no setting takes.",
            where=origin,
            hint=f'{name.rpartition(".")[2]} = "{value.isoformat()}", as a string',
        )
    if isinstance(value, str) and not _is_text(value):
        return UsageError(
            f"{name} is not UTF-8 text: {value!r}.",
            where=origin,
            cause="a name in another encoding, such as Latin-1, which has one byte per letter",
            hint="rename it (convmv), or make a link with a plain name: ln -s",
        )
    if is_mask(name, value):
        return UsageError(
            f"{name} is {value}, the placeholder for a hidden secret.",
            where=origin,
            hint=f"--{name} VALUE, with the real value",
        )
    if name.startswith(f"{JOB}.") and name.count(".") == 1:
        if not is_job_built:
            return None
        hint = f"make_job({name[4:]}={value!r})"
        return UsageError(f"{name} is a parameter of make_job, but this job is already built.", where=origin, hint=hint)
    known_types = known_settings()
    if name not in known_types:
        suggestion = did_you_mean(name, known_types)
        return UsageError(
            f"there is no setting {name!r}.",
            where=origin,
            cause=suggestion,
            hint=_related_settings(name) if is_job_built else "paceline config JOB lists all",
        )
    try:
        converted = msgspec.convert(value, known_types[name], strict=False)
    except msgspec.ValidationError as error:
        default = default_value(name)
        return UsageError(
            f"{name} = {_short_repr(value)}: {_expected_text(name, value, error)}.",
            where=origin,
            hint="leave it out" if default is None else f"the default is {default!r}",
        )
    if name == "seed" and not -(2**63) <= converted < 2**64:
        return UsageError(f"seed = {_short_repr(value)}: expected a 64-bit integer.", where=origin, hint="--seed 1")
    return None


def _short_repr(value: Any) -> str:
    text = repr(value)
    return (
        text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}... ({len(text):,} characters)"
    )


def _expected_text(name: str, value: Any, error: msgspec.ValidationError) -> str:
    """Return the valid values of a setting: its range, or the words to choose from."""
    if limits := range_text(name):
        return f"expected a number, {limits}"
    kind = known_settings()[name]
    if choices := [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]:
        suggestion = did_you_mean(str(value).lower(), choices)
        return f"expected one of {', '.join(choices)}" + (f"; {suggestion.removesuffix('?')}" if suggestion else "")
    text = str(error)
    return text[:1].lower() + text[1:]


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _related_settings(name: str) -> str:
    """Return a hint for Python code: the settings of the same group as `name`, or all groups if there is no such group.

    Python code has no command that lists the settings.
    """
    groups = dict.fromkeys(known.partition(".")[0] for known in known_settings())
    group = name.partition(".")[0]
    same_group = [known for known in known_settings() if known.startswith(f"{group}.")]
    return f"one of {', '.join(same_group)}" if same_group else f"each starts with one of {', '.join(groups)}"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML also escapes DEL
