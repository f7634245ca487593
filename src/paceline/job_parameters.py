"""Parameters of `make_job`: converts text and TOML values to the type of each parameter's annotation or default."""

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import JobError, PacelineError, raise_all

_PLAIN = {"int": int, "float": float, "bool": bool, "str": str}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_NOTHING = ("none", "null")
_SEVERAL = (list, tuple, set, frozenset)
_UNSAID = (inspect.Parameter.empty, Any, object)


_OPEN_ENDED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def missing_parameters(factory: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[JobError]:
    """Yield the parameters of `factory` that have no default and are not given."""
    for name, parameter in inspect.signature(factory).parameters.items():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in _OPEN_ENDED
        if needed and name not in given:
            yield without_default(name)


def without_default(name: str) -> JobError:
    """Return the error for a parameter that needs a value and has none."""
    return JobError(
        f"make_job needs {name}, which has no default.",
        hint=f"--job.{name} VALUE, or a default: def make_job({name}=...)",
    )


def typed_parameters(factory: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values in the types of the parameters of `factory`.

    Raises:
        JobError, Problems: with each value of the wrong type, and each type that can't be made from text.
    """
    parameters = inspect.signature(factory).parameters
    try:
        hints = get_type_hints(factory)
    except Exception:  # an annotation that only a type checker can evaluate
        hints = {}
    found: dict[str, Any] = {}
    problems: list[PacelineError] = []
    for name, value in given.items():
        try:
            found[name] = _typed(name, value, hints.get(name, Any), parameters[name].default)
        except JobError as error:
            problems.append(error)
    raise_all(problems)
    return found


def misfits_of_source(given: Mapping[str, Any], *, sources: Mapping[str, tuple[str, str]]) -> Iterator[JobError]:
    """Yield errors for values of the wrong type, using only the `sources` of annotation and default.

    Only types and defaults that need no import are checked.
    """
    for name, value in given.items():
        annotation, default = sources.get(name, ("", ""))
        kind = _PLAIN.get(annotation, None if annotation else inspect.Parameter.empty)
        try:
            shown = ast.literal_eval(default) if default else inspect.Parameter.empty
        except (ValueError, SyntaxError):
            continue
        if kind is None or (kind is inspect.Parameter.empty and (shown is kind or shown is None)):
            continue
        try:
            _typed(name, value, kind, shown)
        except JobError as error:
            yield error


def _typed(name: str, value: Any, kind: Any, default: Any) -> Any:
    kind = _kind_of(default) if kind in _UNSAID else kind
    shown = "" if default is inspect.Parameter.empty else _text(default)
    if kind is None and default is None and isinstance(value, str) and not isinstance(_guess(value), str):
        raise JobError(
            f"--job.{name}={value}: the type of {name} is unknown, because its default is None.",
            hint=f"def make_job({name}: {type(_guess(value)).__name__} | None = None)",
        )
    if kind is None:
        return value
    try:
        return _convert(value, kind)
    except (ValueError, KeyError, SyntaxError, TypeError):
        raise JobError(
            f"--job.{name}={_text(value)} is not a valid {_words(kind)}.", hint=f"--job.{name}={shown}" if shown else ""
        ) from None


def _kind_of(default: Any) -> Any:
    """Return the type of a default; None if the default does not determine it."""
    if default is None or default is inspect.Parameter.empty:
        return None
    if isinstance(default, Path):
        return Path
    if type(default) in (list, tuple) and default:
        kinds = {type(item) for item in default}
        inner = next(iter(kinds)) if len(kinds) == 1 else Any
        return list[inner] if isinstance(default, list) else tuple[inner, ...]  # type: ignore[valid-type]
    return type(default)


def _convert(value: Any, kind: Any) -> Any:
    """Return the value converted to this type.

    Raises:
        ValueError, KeyError, SyntaxError, TypeError: it can't be converted.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _UNSAID:
        return _guess(value)
    if origin is Annotated:
        return _convert(value, inner[0])
    if origin in (Union, types.UnionType):
        return _one_of(value, inner)
    if origin is Literal:
        return {str(option): option for option in inner}[str(value)]
    base = origin or kind
    if base is None or base is type(None):
        if value is None or str(value).lower() in _NOTHING:
            return None
        raise TypeError
    if not isinstance(base, type):
        return value
    if base in (bool, int, float):
        return _number(value, base)
    if issubclass(base, Enum):
        return value if isinstance(value, base) else _member(value, base)
    if issubclass(base, Path):
        return Path(value)
    if (base is not str and issubclass(base, _SEVERAL)) or base in (Sequence, AnySet):
        return _several(value, base if issubclass(base, _SEVERAL) else list, inner)
    if issubclass(base, Mapping):
        found = ast.literal_eval(value) if isinstance(value, str) else value
        key, item = inner or (Any, Any)
        return {_convert(k, key): _convert(v, item) for k, v in dict(found).items()}
    if not isinstance(value, base):
        raise TypeError
    return value


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, str):
        return _TRUTH[value.lower()] if kind is bool else kind(value)
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError
    return kind(value)


def _one_of(value: Any, kinds: Sequence[Any]) -> Any:
    """Return the value in the first type that accepts it: text is tried last, since it accepts everything."""
    for kind in sorted(kinds, key=lambda one: (one is str, one is not type(None))):
        try:
            return _convert(value, kind)
        except (ValueError, KeyError, SyntaxError, TypeError):
            continue
    raise ValueError


def _member(value: Any, kind: type[Enum]) -> Enum:
    named = {member.name: member for member in kind} | {str(member.value): member for member in kind}
    return named[str(value)]


def _several(value: Any, kind: Any, inner: Sequence[Any]) -> Any:
    if isinstance(value, str):
        is_literal = value.lstrip()[:1] in ("[", "(", "{")
        value = ast.literal_eval(value) if is_literal else [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple | set):
        raise TypeError
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return tuple(_convert(item, one) for item, one in zip(value, inner, strict=True))
    return kind(_convert(item, inner[0] if inner else Any) for item in value)


def _guess(value: Any) -> Any:
    """Return text as the literal it looks like if no type is given: a number, True, a list; else as text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return _TRUTH[value.lower()]
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return found if isinstance(found, int | float | list | tuple | dict) else value


def _words(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{kind.__name__} ({', '.join(member.name for member in kind)})"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
