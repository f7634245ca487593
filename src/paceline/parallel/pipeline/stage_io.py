"""Conversion of the inputs and outputs of blocks to a list of tensors and a JSON description, and back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from paceline.errors import LayoutError

Path = tuple[str | int, ...]
Spec = list[Any]
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True, kw_only=True)
class OutputClasses:
    """The container classes of the blocks' outputs; they are recorded when the model is split, equally on all ranks."""

    by_name: Mapping[str, type]

    @staticmethod
    def of(values: Sequence[Any]) -> "OutputClasses":
        """Return the container classes in these values."""
        return OutputClasses(by_name={_name(kind): kind for value in values for kind in _kinds(value)})


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield each tensor with its path; objects of other classes than tensors and containers are skipped."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, part in _parts(value):
        yield from tensors_in(part, (*path, key))


def replace_at(value: Any, new: Mapping[Path, Tensor], path: Path = ()) -> Any:
    """Return the value with the tensors at the paths of `new` replaced."""
    if path in new:
        return new[path]
    if not any(place[: len(path)] == path for place in new):
        return value
    return _made(type(value), [(key, replace_at(part, new, (*path, key))) for key, part in _parts(value)])


def flatten_output(value: Any, *, where: str) -> tuple[list[Tensor], Spec]:
    """Return a value's tensors, and the description from which `unflatten_output` rebuilds it.

    Raises:
        LayoutError: an object is not a tensor, number, string, None, or a container of these.
    """
    if isinstance(value, Tensor):
        return [value], ["tensor"]
    if value is None or isinstance(value, _PLAIN):
        return [], ["plain", value]
    if not _is_container(value):
        raise LayoutError(
            f"{where} returns an object of class {type(value).__name__}, which can't cross from stage to stage.",
            hint="return tensors, numbers, and tuples, lists or dicts of them; or cut elsewhere with bounds=",
        )
    tensors: list[Tensor] = []
    parts = []
    for key, part in _parts(value):
        found, spec = flatten_output(part, where=where)
        tensors += found
        parts.append([key, spec])
    return tensors, ["of", _name(type(value)), parts]


def unflatten_output(spec: Spec, tensors: Iterator[Tensor], kinds: OutputClasses) -> Any:
    """Return the value that `flatten_output` described, with these tensors."""
    if spec[0] == "tensor":
        return next(tensors)
    if spec[0] == "plain":
        return spec[1]
    kind = _PLAIN_KINDS.get(spec[1]) or kinds.by_name[spec[1]]
    return _made(kind, [(key, unflatten_output(part, tensors, kinds)) for key, part in spec[2]])


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_PLAIN_KINDS: dict[str, type] = {_name(kind): kind for kind in (tuple, list, dict)}


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | tuple | list) or (is_dataclass(value) and not isinstance(value, type))


def _parts(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(item.name, getattr(value, item.name)) for item in fields(value)]
    return []


def _made(kind: type, parts: Sequence[tuple[str | int, Any]]) -> Any:
    if issubclass(kind, tuple | list):
        values = [part for _, part in parts]
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    if is_dataclass(kind):
        return kind(**{str(key): part for key, part in parts})
    return kind(dict(parts))  # type: ignore[call-arg]


def _kinds(value: Any) -> Iterator[type]:
    if _is_container(value):
        yield type(value)
        for _, part in _parts(value):
            yield from _kinds(part)
