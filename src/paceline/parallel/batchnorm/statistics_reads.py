"""Detection of code that reads running statistics during a step, such as `h + self.norm.running_mean`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.torch_internals.private_api import NormBase

_ABOUT = frozenset(
    ("size", "dim", "numel", "stride", "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf")
)
"""Names of tensor attributes and methods that don't read its values."""


class StatisticsReads(TorchFunctionMode):
    """A function mode that calls `seen(norm)` if a torch function outside the norm's forward gets its statistics.

    `is_inside(norm)` returns whether the norm's own forward runs.
    """

    def __init__(
        self,
        norms: Iterable[NormBase],
        *,
        is_inside: Callable[[NormBase], bool],
        seen: Callable[[NormBase], None],
    ) -> None:
        super().__init__()
        held = [(part, norm) for norm in norms for part in (norm.running_mean, norm.running_var)]
        self._norms = {id(part): norm for part, norm in held if part is not None}
        self._is_inside, self._seen = is_inside, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Report the norms whose statistics `func` reads, then run it."""
        kwargs = kwargs or {}
        if _name(func) not in _ABOUT:
            for tensor in _tensors((*args, *kwargs.values())):
                norm = self._norms.get(id(tensor))
                if norm is not None and not self._is_inside(norm):
                    self._seen(norm)
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    """Return a function's name; for an attribute access, a call of `__get__`, return the attribute's name."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
