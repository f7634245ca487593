"""The parameters of `make_job`: text and TOML values are converted to the type of the annotation or the default."""

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import JobError, PacelineError, raise_all

_SIMPLE_TYPES = {"int": int, "float": float, "bool": bool, "str": str}
_TRUTH_VALUES = {"true": True, "1": True, "false": False, "0": False}
_NONE_TEXTS = ("none", "null")
_COLLECTIONS = (list, tuple, set, frozenset)
_UNTYPED = (inspect.Parameter.empty, Any, object)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def missing_parameters(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Iterator[JobError]:
    """Yield an error for each parameter of `factory` that has no default and is not given."""
    for name, parameter in inspect.signature(factory).parameters.items():
        is_required = parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIADIC
        if is_required and name not in arguments:
            yield missing_value_error(name)


def missing_value_error(name: str) -> JobError:
    """Return the error for a parameter that needs a value and has none."""
    return JobError(
        f"make_job needs {name}, which has no default.",
        hint=f"--job.{name} VALUE, or a default: def make_job({name}=...)",
    )


def typed_parameters(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values in the types of the parameters of `factory`.

    Raises:
        JobError, Problems: values have the wrong type, or a type can't be made from text; all are reported.
    """
    parameters = inspect.signature(factory).parameters
    try:
        hints = get_type_hints(factory)
    except Exception:  # an annotation that only a type checker can evaluate
        hints = {}
    converted: dict[str, Any] = {}
    problems: list[PacelineError] = []
    for name, value in arguments.items():
        try:
            converted[name] = _convert_parameter(name, value, hints.get(name, Any), parameters[name].default)
        except JobError as error:
            problems.append(error)
    raise_all(problems)
    return converted


def check_against_source(arguments: Mapping[str, Any], *, sources: Mapping[str, tuple[str, str]]) -> Iterator[JobError]:
    """Yield errors for values of the wrong type, without an import of the job.

    `sources` has the source text of each parameter's annotation and default. A value is checked if the annotation is
    `int`, `float`, `bool` or `str`, or if there is no annotation and the default is a literal other than None. If the
    default is not a literal, the value is not checked.
    """
    for name, value in arguments.items():
        annotation, default = sources.get(name, ("", ""))
        kind = _SIMPLE_TYPES.get(annotation, None if annotation else inspect.Parameter.empty)
        try:
            default_value = ast.literal_eval(default) if default else inspect.Parameter.empty
        except (ValueError, SyntaxError):
            continue
        if kind is None or (kind is inspect.Parameter.empty and (default_value is kind or default_value is None)):
            continue
        try:
            _convert_parameter(name, value, kind, default_value)
        except JobError as error:
            yield error


def _convert_parameter(name: str, value: Any, kind: Any, default: Any) -> Any:
    """Return the value of a parameter in the type `kind`, or in the type of its default if `kind` is unknown.

    Raises:
        JobError: the value can't be converted, or text could have several types and the default is None.
    """
    kind = _type_of_default(default) if kind in _UNTYPED else kind
    default_text = "" if default is inspect.Parameter.empty else _value_text(default)
    if kind is None and default is None and isinstance(value, str) and not isinstance(_parse_literal(value), str):
        raise JobError(
            f"--job.{name}={value}: the type of {name} is unknown, because its default is None.",
            hint=f"def make_job({name}: {type(_parse_literal(value)).__name__} | None = None)",
        )
    if kind is None:
        return value
    try:
        return _convert(value, kind)
    except (ValueError, KeyError, SyntaxError, TypeError):
        raise JobError(
            f"--job.{name}={_value_text(value)} is not a valid {_type_text(kind)}.",
            hint=f"--job.{name}={default_text}" if default_text else "",
        ) from None


def _type_of_default(default: Any) -> Any:
    """Return the type of a default; None if the default does not determine it."""
    if default is None or default is inspect.Parameter.empty:
        return None
    if isinstance(default, Path):
        return Path
    if type(default) in (list, tuple) and default:
        item_types = {type(item) for item in default}
        inner = next(iter(item_types)) if len(item_types) == 1 else Any
        return list[inner] if isinstance(default, list) else tuple[inner, ...]  # type: ignore[valid-type]
    return type(default)


def _convert(value: Any, kind: Any) -> Any:
    """Return the value converted to this type.

    Raises:
        ValueError, KeyError, SyntaxError, TypeError: the value can't be converted.
    """
    origin, type_arguments = get_origin(kind), get_args(kind)
    if kind in _UNTYPED:
        return _parse_literal(value)
    if origin is Annotated:
        return _convert(value, type_arguments[0])
    if origin in (Union, types.UnionType):
        return _convert_union(value, type_arguments)
    if origin is Literal:
        return {str(option): option for option in type_arguments}[str(value)]
    base = origin or kind
    if base is None or base is type(None):
        if value is None or str(value).lower() in _NONE_TEXTS:
            return None
        raise TypeError
    if not isinstance(base, type):
        return value
    if base in (bool, int, float):
        return _convert_number(value, base)
    if issubclass(base, Enum):
        return value if isinstance(value, base) else _enum_member(value, base)
    if issubclass(base, Path):
        return Path(value)
    if (base is not str and issubclass(base, _COLLECTIONS)) or base in (Sequence, AnySet):
        return _convert_collection(value, base if issubclass(base, _COLLECTIONS) else list, type_arguments)
    if issubclass(base, Mapping):
        mapping = ast.literal_eval(value) if isinstance(value, str) else value
        key, item = type_arguments or (Any, Any)
        return {_convert(k, key): _convert(v, item) for k, v in dict(mapping).items()}
    if not isinstance(value, base):
        raise TypeError
    return value


def _convert_number(value: Any, kind: type) -> Any:
    if isinstance(value, str):
        return _TRUTH_VALUES[value.lower()] if kind is bool else kind(value)
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError
    return kind(value)


def _convert_union(value: Any, kinds: Sequence[Any]) -> Any:
    """Return the value in the first type that accepts it; `str` is tried last, since it accepts everything."""
    for kind in sorted(kinds, key=lambda kind: (kind is str, kind is not type(None))):
        try:
            return _convert(value, kind)
        except (ValueError, KeyError, SyntaxError, TypeError):
            continue
    raise ValueError


def _enum_member(value: Any, kind: type[Enum]) -> Enum:
    members = {member.name: member for member in kind} | {str(member.value): member for member in kind}
    return members[str(value)]


def _convert_collection(value: Any, kind: Any, type_arguments: Sequence[Any]) -> Any:
    if isinstance(value, str):
        is_literal = value.lstrip()[:1] in ("[", "(", "{")
        value = ast.literal_eval(value) if is_literal else [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple | set):
        raise TypeError
    if kind is tuple and type_arguments and type_arguments[-1] is not Ellipsis:
        return tuple(_convert(item, item_type) for item, item_type in zip(value, type_arguments, strict=True))
    return kind(_convert(item, type_arguments[0] if type_arguments else Any) for item in value)


def _parse_literal(value: Any) -> Any:
    """Return text that is a literal (a number, True, a list) as the literal's value, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return _TRUTH_VALUES[value.lower()]
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return literal if isinstance(literal, int | float | list | tuple | dict) else value


def _type_text(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{kind.__name__} ({', '.join(member.name for member in kind)})"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _value_text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
