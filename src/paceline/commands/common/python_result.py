"""The result of a verb as a Python object: the keys of its `--json` as attributes."""

from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override


class Result(Mapping[str, Any]):
    """The keys of a verb's `--json`, as attributes and as a mapping. As text, it is what the command prints.

    Nested objects are `Result`s too, so that `found.first_difference.step` and `found.plans[0].layout` work.
    """

    def __init__(self, value: Mapping[str, Any], *, text: str = "") -> None:
        self._value = dict(value)
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._value:
            raise AttributeError(f"this result has no {name!r}; it has {', '.join(map(str, self._value))}")
        return _as_result(self._value[name])

    @override
    def __getitem__(self, name: str) -> Any:
        return _as_result(self._value[name])

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    @override
    def __len__(self) -> int:
        return len(self._value)

    @override
    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *map(str, self._value)]

    @override
    def __str__(self) -> str:
        return self._text or repr(self)

    @override
    def __repr__(self) -> str:
        return f"Result({', '.join(f'{name}={value!r}' for name, value in self._value.items())})"

    def as_json(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, as `--json` prints them."""
        return dict(self._value)


def _as_result(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Result(value)
    if isinstance(value, list | tuple):
        return [_as_result(item) for item in value]
    return value
