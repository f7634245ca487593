"""Code that looks at running statistics while a step runs: `h + self.norm.running_mean`, say, in a forward."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.torch_internals.private_api import NormBase

_ABOUT = frozenset(
    ("size", "dim", "numel", "stride", "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf")
)
"""What is asked of a tensor without a look at its values."""


class StatisticsReads(TorchFunctionMode):
    """Calls `seen(norm)` for each of `norms` whose statistics a torch function is given, but in the norm's own forward.

    `is_inside(norm)` says whether that runs.
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
        """One function."""
        kwargs = kwargs or {}
        if _name(func) not in _ABOUT:
            for tensor in _tensors((*args, *kwargs.values())):
                norm = self._norms.get(id(tensor))
                if norm is not None and not self._is_inside(norm):
                    self._seen(norm)
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    """Of an attribute, its own: what is called then is its `__get__`."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
