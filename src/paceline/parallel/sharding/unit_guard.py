"""Guards that detect calls in which an FSDP unit would behave differently from the same module in one process.

`fully_shard` passes a unit copies of the lists and dicts in its arguments, replaces the unit's parameters before it
runs, and drops writes to them at the next gather. It raises no error: a lost write or a replaced parameter would
silently change the training.
"""

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm.process_group import World
from paceline.errors import JobError, LayoutError, user_line
from paceline.parallel.sharding.execution_order_check import UnitOrderCheck
from paceline.torch_internals.private_api import (
    CallInterceptor,
    in_backward,
    module_registries,
    tensor_version,
    tree_flatten,
)
from paceline.user_code import is_users_own

_DEEP = 8
_ELSEWHERE = "--layout zero2 (zero=2 in a mixture), which keeps parameters whole"
_UNCOPIED = ("_fully_shard.py", "parallel/tensor_parallel/sharded_tensor.py")
_running = threading.local()
_open: list[None] = []  # running forwards, in all threads: on a GPU, backward runs in a separate thread


class UnitGuards:
    """The guards of one model's units.

    `is_pipelined`: the model's forward stops before its end, and other forwards run before its backward.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], *, world: World, is_left: bool) -> None:
        names = {id(module): name or "the model's own" for name, module in model.named_modules()}
        self._guards = {id(unit): _Guard(self, names[id(unit)], n) for n, unit in enumerate(units)}
        self.order = UnitOrderCheck([guard.name for guard in self._guards.values()], world=world)
        self._is_left, self._model = is_left, model
        self._runs = 0

    @contextmanager
    def around(self, unit: nn.Module) -> Iterator[None]:
        """Register the guard's hooks before and after the hooks that the `with` body registers on the unit."""
        guard = self._guards[id(unit)]
        unit.register_forward_pre_hook(guard.entered, prepend=True, with_kwargs=True)
        unit.register_forward_hook(guard.left)
        yield
        unit.register_forward_pre_hook(guard.called, prepend=True, with_kwargs=True)

    def watched(self, unit: nn.Module, output: Any) -> Any:
        """Register hooks on a unit's output that run when its backward starts, before it is gathered; return output."""
        if unit is not self._model:
            self._guards[id(unit)].given(output)
        return output

    def know(self, unit: nn.Module, name: str, owner: nn.Module, own: str, either: Sequence[nn.Parameter]) -> None:
        """Register a parameter of a unit, with its sharded and its gathered form."""
        if isinstance(either[0], DTensor):
            either[0].__class__ = LockedParameter  # type: ignore[assignment]
            vars(either[0])["known_as"] = name
        self._guards[id(unit)].parameters.append((name, module_registries(owner)[0], own, tuple(either)))
        self._guards[id(unit)].trains.append(either[0].requires_grad)

    def begin(self) -> None:
        """Intercept calls of the model, after all parameters are registered; pipeline stages do not call the model."""
        if not self._is_left:
            CallInterceptor(self._model, self._run)

    def refuse_early(self) -> None:
        """Raise LayoutError if a unit runs backward before the model's forward or the loss has ended."""
        if self._runs or _open:
            raise LayoutError(
                "the forward or the loss runs its own backward through units that fsdp has already freed.",
                cause="torch.autograd.grad there, as for a gradient penalty",
                hint=_ELSEWHERE,
            )

    def _run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._runs += 1
        try:
            with forward_runs():
                return call(*args, **kwargs)
        finally:
            self._runs -= 1


class _Guard:
    """The guard of one unit, with the state of its current and last call."""

    def __init__(self, guards: UnitGuards, name: str, number: int) -> None:
        self.name, self._guards, self._number = name, guards, number
        self.parameters: list[tuple[str, dict[str, Any], str, tuple[nn.Parameter, ...]]] = []
        self.trains: list[bool] = []
        self._from_caller: list[Any] = []
        self._copies: list[tuple[Any, Any]] = []
        self._versions: list[int] = []
        self._left: list[int] = []

    def called(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Check the unit's parameters before the call; a forward pre-hook that runs before all others."""
        self._from_caller = [*_containers((*args, *kwargs.values()))]
        for number, (name, owner, own, either) in enumerate(self.parameters):
            if self._left and tensor_version(either[-1]) != self._left[number]:
                raise LayoutError(
                    f"{name} was written to while it was gathered, but the rows that fsdp keeps were not changed.",
                    cause="a callback that changes weights after an evaluation",
                    hint=_ELSEWHERE,
                )
            if not any(owner.get(own) is known for known in either):
                raise LayoutError(
                    f"{self.name} is called with another tensor instead of its parameter {name}, and fsdp would "
                    "restore its own.",
                    cause="torch.func.functional_call, or an assignment to the parameter",
                    hint=_ELSEWHERE,
                )

    def entered(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the arguments and parameter versions; a forward pre-hook that runs after those that gather."""
        if not in_backward():
            self._guards.order.saw(self._number)
        self._freeze()
        same = set(map(id, self._from_caller))
        inside: Iterable[Any] = _containers((*args, *kwargs.values())) if same else ()
        self._copies = [(each, _content(each)) for each in inside if id(each) not in same]
        self._versions = [tensor_version(either[-1]) for *_, either in self.parameters]

    def _freeze(self) -> None:
        """Apply a change of `requires_grad`, made on either the sharded or the gathered parameter, to both."""
        for number, (*_, either) in enumerate(self.parameters):
            if either[0].requires_grad != either[-1].requires_grad:
                for parameter in either:
                    parameter.requires_grad_(not self.trains[number])
            self.trains[number] = either[0].requires_grad

    def left(self, *_: Any) -> None:
        """Check for lost writes after the call; a forward hook that runs before those that free the parameters."""
        for given, before in self._copies:
            if not _is_same(_content(given), before):
                raise LayoutError(
                    f"{self.name} writes to a {type(given).__name__} that it gets as an argument, "
                    "and under fsdp it gets a "
                    "copy: the change would be lost.",
                    cause="append, update or an assignment to an object of the caller",
                    hint=f"return the value instead; or {_ELSEWHERE}",
                )
        for known, version_before in zip(self.parameters, self._versions, strict=True):
            if tensor_version(known[-1][-1]) != version_before:
                raise JobError(
                    f"the forward writes to the parameter {known[0]}: each replica would write different values.",
                    cause="nn.Embedding(max_norm=...), or a forward that assigns to its weights",
                    hint="F.normalize(self.weight) where it is used, or --ranks 1 without --train.exact",
                )
        self._copies, self._from_caller = [], []
        self._left = self._versions

    def given(self, output: Any) -> None:
        """Call the backward checks when the first tensor of the output gets a gradient."""
        if not torch.is_grad_enabled() or in_backward():
            return
        came: list[Callable[[], None]] = [
            self._guards.refuse_early,
            partial(self._guards.order.saw, self._number, backward=True),
        ]

        def first(_: Tensor) -> None:
            while came:
                came.pop(0)()

        for leaf in [output] if isinstance(output, Tensor) else tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(first)


class LockedParameter(DTensor):
    """A sharded parameter that no forward may use: a result would depend only on this rank's rows."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise LayoutError inside a forward; elsewhere dispatch as DTensor does."""
        if getattr(_running, "depth", 0) and not in_backward():
            for leaf in tree_flatten((args, kwargs))[0]:
                if isinstance(leaf, cls) and "known_as" in vars(leaf):
                    raise _elsewhere(vars(leaf)["known_as"])
        return super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@contextmanager
def forward_runs() -> Iterator[None]:
    """Guard a forward: refuse uses of sharded parameters, and replace errors of `fully_shard` by clearer ones.

    Raises:
        LayoutError: the forward does something that sharded units don't support; the hint names the alternatives.
    """
    _running.depth = getattr(_running, "depth", 0) + 1
    _open.append(None)
    try:
        yield
    except (RuntimeError, AssertionError, TypeError) as error:
        found = _copied(error) or _explained(error)
        if found is None:
            raise
        raise found.with_traceback(error.__traceback__) from error
    finally:
        _running.depth -= 1
        _open.pop()


def _copied(error: Exception) -> LayoutError | None:
    """Return the error for a module copied in the forward, if `fully_shard` or a sharded tensor refused the copy."""
    frames = extract_tb(error.__traceback__)
    if not any(frame.filename == copy.__file__ for frame in frames):
        return None
    if not any(frame.filename.endswith(_UNCOPIED) for frame in frames) and "FSDP does not support" not in str(error):
        return None
    return LayoutError(
        "the forward copies a module (copy.deepcopy or copy.copy) that is sharded: the copy would contain only this "
        "rank's shards.",
        where=str(user_line(error) or ""),
        cause="a teacher or a frozen twin that is recreated in each forward",
        hint=f"call the module itself, for a teacher under torch.no_grad(); or {_ELSEWHERE}",
    )


def _explained(error: Exception) -> LayoutError | None:
    text = str(error)
    if "DTensor" in text and not is_users_own(error):
        return _elsewhere("a parameter")
    if "RegisterPostBackwardFunction" in text and "modified inplace" in text:
        return LayoutError(
            "a block writes in place to its argument, which under fsdp is a view that forbids it.",
            where=str(user_line(error) or ""),
            cause="x += ..., x.add_(...) or x[...] = ... on an argument",
            hint=f"x = x + ..., and return it; or {_ELSEWHERE}",
        )
    return None


def in_the_loss(name: str) -> LayoutError:
    """Return the error for a weight penalty in the loss, whose gradient would be lost."""
    return LayoutError(
        f"the loss uses {name} itself, but under fsdp a rank has only its rows.",
        cause="a weight penalty: a sum over model.parameters() that is added to the loss",
        hint=f"weight_decay= of the optimizer; or {_ELSEWHERE}",
    )


def _elsewhere(name: str) -> LayoutError:
    return LayoutError(
        f"{name} is used outside its fsdp unit, where a rank has only its rows.",
        cause="a weight, a submodule or another method of a block is used outside the block's forward",
        hint=f"{_ELSEWHERE}; or --place.units with a module around both",
    )


def _containers(values: Sequence[Any], depth: int = 0) -> Iterator[Any]:
    """Yield the mutable containers among the values, nested ones too."""
    for value in values:
        if value is None or isinstance(value, Tensor | int | float | str) or depth > _DEEP:
            continue
        if isinstance(value, dict):
            yield value
            yield from _containers(list(value.values()), depth + 1)
        elif isinstance(value, list | tuple):
            if isinstance(value, list):
                yield value
            yield from _containers(value, depth + 1)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield value
            yield from _containers([getattr(value, f.name, None) for f in dataclasses.fields(value)], depth + 1)


def _content(container: Any) -> dict[Any, Any]:
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container) if isinstance(container, dict) else dict(getattr(container, "__dict__", {}))


def _is_same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return len(now) == len(before) and all(key in now and now[key] is value for key, value in before.items())
