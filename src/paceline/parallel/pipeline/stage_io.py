"""Conversion of the inputs and outputs of blocks to a list of tensors and a JSON description, and back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from paceline.errors import LayoutError

TensorPath = tuple[str | int, ...]
"""The keys that lead from a value to a tensor inside it."""
OutputSpec = list[Any]
"""The JSON description of a value: ["tensor"], ["plain", value], or ["of", class name, [[key, spec], ...]]."""
_PLAIN_TYPES = (bool, int, float, str)


@dataclass(frozen=True, kw_only=True)
class OutputClasses:
    """The container classes of the blocks' outputs; recorded when the model is split, and the same on all ranks."""

    by_name: Mapping[str, type]

    @staticmethod
    def from_values(values: Sequence[Any]) -> "OutputClasses":
        """Return the container classes in these values."""
        classes = (container for value in values for container in _container_classes(value))
        return OutputClasses(by_name={_class_name(container): container for container in classes})


def tensors_in(value: Any, path: TensorPath = ()) -> Iterator[tuple[TensorPath, Tensor]]:
    """Yield each tensor with its path; objects of other classes than tensors and containers are skipped."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, item in _items(value):
        yield from tensors_in(item, (*path, key))


def substitute_tensors(value: Any, new_tensors: Mapping[TensorPath, Tensor], path: TensorPath = ()) -> Any:
    """Return the value with the tensors at the paths of `new_tensors` replaced."""
    if path in new_tensors:
        return new_tensors[path]
    if not any(new_path[: len(path)] == path for new_path in new_tensors):
        return value
    items = [(key, substitute_tensors(item, new_tensors, (*path, key))) for key, item in _items(value)]
    return _make_container(type(value), items)


def flatten_output(value: Any, *, where: str) -> tuple[list[Tensor], OutputSpec]:
    """Return a value's tensors, and the description from which `unflatten_output` rebuilds it.

    Raises:
        LayoutError: an object is not a tensor, number, string, None, or a container of these.
    """
    if isinstance(value, Tensor):
        return [value], ["tensor"]
    if value is None or isinstance(value, _PLAIN_TYPES):
        return [], ["plain", value]
    if not _is_container(value):
        raise LayoutError(
            f"{where} returns an object of class {type(value).__name__}, which can't be sent to another stage.",
            hint="return tensors, numbers, and tuples, lists or dicts of them; or cut elsewhere: --place.stages",
        )
    tensors: list[Tensor] = []
    item_specs = []
    for key, item in _items(value):
        item_tensors, spec = flatten_output(item, where=where)
        tensors += item_tensors
        item_specs.append([key, spec])
    return tensors, ["of", _class_name(type(value)), item_specs]


def unflatten_output(spec: OutputSpec, tensors: Iterator[Tensor], output_classes: OutputClasses) -> Any:
    """Return the value that `flatten_output` described, with these tensors."""
    if spec[0] == "tensor":
        return next(tensors)
    if spec[0] == "plain":
        return spec[1]
    container = _BUILTIN_CONTAINERS.get(spec[1]) or output_classes.by_name[spec[1]]
    return _make_container(
        container, [(key, unflatten_output(item_spec, tensors, output_classes)) for key, item_spec in spec[2]]
    )


def _class_name(container: type) -> str:
    return f"{container.__module__}.{container.__qualname__}"


_BUILTIN_CONTAINERS: dict[str, type] = {_class_name(container): container for container in (tuple, list, dict)}


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | tuple | list) or (is_dataclass(value) and not isinstance(value, type))


def _items(value: Any) -> list[tuple[str | int, Any]]:
    """Return the keys and items of a container, or nothing for another value."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []


def _make_container(container: type, items: Sequence[tuple[str | int, Any]]) -> Any:
    if issubclass(container, tuple | list):
        values = [item for _, item in items]
        return container(*values) if hasattr(container, "_fields") else container(values)
    if is_dataclass(container):
        return container(**{str(key): item for key, item in items})
    return container(dict(items))  # type: ignore[call-arg]


def _container_classes(value: Any) -> Iterator[type]:
    if _is_container(value):
        yield type(value)
        for _, item in _items(value):
            yield from _container_classes(item)
