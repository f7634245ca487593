"""Guards detect calls in which an FSDP unit would behave differently from the same module in one process.

`fully_shard` passes copies of lists and dicts to a unit, and replaces the unit's parameters before it runs. The next
gather overwrites what the unit wrote to its parameters. `fully_shard` raises no error, so a lost write or a replaced
parameter would silently change the training.
"""

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.errors import JobError, LayoutError, user_line
from paceline.parallel.sharding.execution_order_check import UnitOrderCheck
from paceline.torch_internals.private_api import (
    CallInterceptor,
    is_in_backward,
    module_registries,
    tensor_version,
    tree_flatten,
)
from paceline.user_code import is_raised_by_user_code

_MAX_DEPTH = 8
_ALTERNATIVE = "--layout zero2 (zero=2 in a mixture), which keeps parameters whole"
_COPY_REFUSING_FILES = ("_fully_shard.py", "parallel/tensor_parallel/sharded_tensor.py")
_forward_state = threading.local()
_open_forwards: list[None] = []
"""One entry for each running forward of any thread. It is not thread-local, as a GPU's backward has its own thread."""


class UnitGuards:
    """The guards of one model's units.

    `is_pipelined` is True if the model is a pipeline stage, whose layers run without a call of the model.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], *, world: World, is_pipelined: bool) -> None:
        names = {id(module): name or "the model itself" for name, module in model.named_modules()}
        self._guards = {id(unit): _Guard(self, names[id(unit)], index) for index, unit in enumerate(units)}
        self.order_check = UnitOrderCheck([guard.name for guard in self._guards.values()], world=world)
        self._is_pipelined, self._model = is_pipelined, model
        self._num_running = 0  # calls of the model

    @contextmanager
    def add_hooks_around(self, unit: nn.Module) -> Iterator[None]:
        """Register the guard's hooks before and after the hooks that the `with` body registers on the unit."""
        guard = self._guards[id(unit)]
        unit.register_forward_pre_hook(guard.record_arguments, prepend=True, with_kwargs=True)
        unit.register_forward_hook(guard.check_after_call)
        yield
        unit.register_forward_pre_hook(guard.check_before_call, prepend=True, with_kwargs=True)

    def watch_output(self, unit: nn.Module, output: Any) -> Any:
        """Check the unit when its backward starts, by hooks on the tensors of its output; return the output."""
        if unit is not self._model:
            self._guards[id(unit)].watch_backward(output)
        return output

    def register_parameter(
        self,
        unit: nn.Module,
        name: str,
        owner: nn.Module,
        attribute: str,
        *,
        sharded: nn.Parameter,
        gathered: nn.Parameter,
    ) -> None:
        """Register a parameter of a unit, in its sharded and its gathered form.

        `name` is the parameter's full name. The module `owner`, which is the unit or inside it, has the parameter under
        the name `attribute`.
        """
        if isinstance(sharded, DTensor):
            sharded.__class__ = LockedParameter  # type: ignore[assignment]
            vars(sharded)["parameter_name"] = name
        self._guards[id(unit)].parameters.append(
            _UnitParameter(
                name=name,
                registry=module_registries(owner)[0],
                attribute=attribute,
                sharded=sharded,
                gathered=gathered,
                requires_grad=sharded.requires_grad,
            )
        )

    def intercept_calls(self) -> None:
        """Guard each call of the model. Call this after all parameters are registered.

        A pipeline does not call the model, so this does nothing for a pipeline stage.
        """
        if not self._is_pipelined:
            CallInterceptor(self._model, self._run_call)

    def refuse_early_backward(self) -> None:
        """Raise LayoutError if a unit runs backward before the model's forward or the loss has ended."""
        if self._num_running or _open_forwards:
            raise LayoutError(
                "the forward or the loss runs its own backward through units that fsdp has already freed.",
                cause="torch.autograd.grad there, as for a gradient penalty",
                hint=_ALTERNATIVE,
            )

    def _run_call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._num_running += 1
        try:
            with guard_sharded_forward():
                return call(*args, **kwargs)
        finally:
            self._num_running -= 1


@dataclass(kw_only=True)
class _UnitParameter:
    """A parameter of a unit, in its sharded and its gathered form.

    `registry` is the parameter dict of its module, in which one of the two forms has the key `attribute`.
    `requires_grad` is the value that both forms had last.
    """

    name: str
    registry: dict[str, Any]
    attribute: str
    sharded: nn.Parameter
    gathered: nn.Parameter
    requires_grad: bool


class _Guard:
    """The guard of one unit, with the state of its current and last call."""

    def __init__(self, guards: UnitGuards, name: str, index: int) -> None:
        self.name, self._guards, self._index = name, guards, index
        self.parameters: list[_UnitParameter] = []
        self._caller_containers: list[Any] = []  # lists, dicts and dataclasses in the arguments that the caller passed
        self._copied_containers: list[tuple[Any, Any]] = []  # the copies of them that the unit gets, and their content
        self._versions: list[int] = []  # the versions of the gathered parameters before the call
        self._versions_after_call: list[int] = []

    def check_before_call(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Check the unit's parameters before the call; a forward pre-hook that runs before all others."""
        self._caller_containers = [*_containers((*args, *kwargs.values()))]
        for index, parameter in enumerate(self.parameters):
            if self._versions_after_call and tensor_version(parameter.gathered) != self._versions_after_call[index]:
                raise LayoutError(
                    f"{parameter.name} was written to while it was gathered, but the rows that fsdp keeps were not "
                    "changed.",
                    cause="a callback that changes weights after an evaluation",
                    hint=_ALTERNATIVE,
                )
            registered = parameter.registry.get(parameter.attribute)
            if registered is not parameter.sharded and registered is not parameter.gathered:
                raise LayoutError(
                    f"{self.name} is called with another tensor instead of its parameter {parameter.name}, and fsdp "
                    "would restore its own.",
                    cause="torch.func.functional_call, or an assignment to the parameter",
                    hint=_ALTERNATIVE,
                )

    def record_arguments(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the arguments and parameter versions; a forward pre-hook that runs after `fully_shard`'s."""
        if not is_in_backward():
            self._guards.order_check.record_gather(self._index)
        self._sync_requires_grad()
        caller_ids = set(map(id, self._caller_containers))
        containers: Iterable[Any] = _containers((*args, *kwargs.values())) if caller_ids else ()
        self._copied_containers = [
            (container, _content(container)) for container in containers if id(container) not in caller_ids
        ]
        self._versions = [tensor_version(parameter.gathered) for parameter in self.parameters]

    def _sync_requires_grad(self) -> None:
        """Copy a change of `requires_grad` from one form of a parameter, sharded or gathered, to the other."""
        for parameter in self.parameters:
            if parameter.sharded.requires_grad != parameter.gathered.requires_grad:
                for form in (parameter.sharded, parameter.gathered):
                    form.requires_grad_(not parameter.requires_grad)
            parameter.requires_grad = parameter.sharded.requires_grad

    def check_after_call(self, *_: Any) -> None:
        """Check for lost writes after the call; a forward hook that runs before `fully_shard` frees the parameters."""
        for container, before in self._copied_containers:
            if not _is_same(_content(container), before):
                raise LayoutError(
                    f"{self.name} writes to a {type(container).__name__} that it gets as an argument, and under fsdp "
                    "it gets a copy: the change would be lost.",
                    cause="append, update or an assignment to an object of the caller",
                    hint=f"return the value instead; or {_ALTERNATIVE}",
                )
        for parameter, version_before in zip(self.parameters, self._versions, strict=True):
            if tensor_version(parameter.gathered) != version_before:
                raise JobError(
                    f"the forward writes to the parameter {parameter.name}: each replica would write different values.",
                    cause="nn.Embedding(max_norm=...), or a forward that assigns to its weights",
                    hint="F.normalize(self.weight) where it is used, or --ranks 1 without --train.exact",
                )
        self._copied_containers, self._caller_containers = [], []
        self._versions_after_call = self._versions

    def watch_backward(self, output: Any) -> None:
        """Run the backward checks as soon as one tensor of the output gets a gradient."""
        if not torch.is_grad_enabled() or is_in_backward():
            return
        checks: list[Callable[[], None]] = [
            self._guards.refuse_early_backward,
            partial(self._guards.order_check.record_gather, self._index, backward=True),
        ]

        def run_checks(_: Tensor) -> None:
            while checks:
                checks.pop(0)()

        for leaf in [output] if isinstance(output, Tensor) else tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(run_checks)


class LockedParameter(DTensor):
    """A sharded parameter that raises an error if a forward uses it, since it has only this rank's rows."""

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise LayoutError inside a forward; elsewhere dispatch as DTensor does."""
        if getattr(_forward_state, "depth", 0) and not is_in_backward():
            for leaf in tree_flatten((args, kwargs))[0]:
                if isinstance(leaf, cls) and "parameter_name" in vars(leaf):
                    raise _outside_unit_error(vars(leaf)["parameter_name"])
        return super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@contextmanager
def guard_sharded_forward() -> Iterator[None]:
    """Guard a forward: refuse uses of sharded parameters, and replace errors of `fully_shard` by clearer ones.

    Raises:
        LayoutError: the forward does something that sharded units don't support; the hint names the alternatives.
    """
    _forward_state.depth = getattr(_forward_state, "depth", 0) + 1
    _open_forwards.append(None)
    try:
        yield
    except (RuntimeError, AssertionError, TypeError) as error:
        replacement = _module_copy_error(error) or _clearer_error(error)
        if replacement is None:
            raise
        raise replacement.with_traceback(error.__traceback__) from error
    finally:
        _forward_state.depth -= 1
        _open_forwards.pop()


def _module_copy_error(error: Exception) -> LayoutError | None:
    """Return the error for a module copied in the forward, if `fully_shard` or a sharded tensor refused the copy."""
    frames = extract_tb(error.__traceback__)
    if not any(frame.filename == copy.__file__ for frame in frames):
        return None
    if not any(
        frame.filename.endswith(_COPY_REFUSING_FILES) for frame in frames
    ) and "FSDP does not support" not in str(error):
        return None
    return LayoutError(
        "the forward copies a module (copy.deepcopy or copy.copy) that is sharded: the copy would contain only this "
        "rank's shards.",
        where=str(user_line(error) or ""),
        cause="a teacher or a frozen twin that is recreated in each forward",
        hint=f"call the module itself, for a teacher under torch.no_grad(); or {_ALTERNATIVE}",
    )


def _clearer_error(error: Exception) -> LayoutError | None:
    """Return an error that explains an error of `fully_shard`, or None for other errors."""
    message = str(error)
    if "DTensor" in message and not is_raised_by_user_code(error):
        return _outside_unit_error("a parameter")
    if "RegisterPostBackwardFunction" in message and "modified inplace" in message:
        return LayoutError(
            "a block writes in place to its argument, which under fsdp is a view that forbids it.",
            where=str(user_line(error) or ""),
            cause="x += ..., x.add_(...) or x[...] = ... on an argument",
            hint=f"x = x + ..., and return it; or {_ALTERNATIVE}",
        )
    return None


def parameter_in_loss_error(name: str) -> LayoutError:
    """Return the error for a weight penalty in the loss, whose gradient would be lost."""
    return LayoutError(
        f"the loss uses {name} itself, but under fsdp a rank has only its rows.",
        cause="a weight penalty: a sum over model.parameters() that is added to the loss",
        hint=f"weight_decay= of the optimizer; or {_ALTERNATIVE}",
    )


def _outside_unit_error(name: str) -> LayoutError:
    return LayoutError(
        f"{name} is used outside its fsdp unit, where a rank has only its rows.",
        cause="a weight, a submodule or another method of a block is used outside the block's forward",
        hint=f"{_ALTERNATIVE}; or --place.units with a module around both",
    )


def _containers(values: Sequence[Any], depth: int = 0) -> Iterator[Any]:
    """Yield the lists, dicts and dataclass objects among the values, also nested ones."""
    for value in values:
        if value is None or isinstance(value, Tensor | int | float | str) or depth > _MAX_DEPTH:
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
    """Return the items of a container, by index, key or attribute."""
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container) if isinstance(container, dict) else dict(getattr(container, "__dict__", {}))


def _is_same(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> bool:
    """Return whether two mappings have the same keys and, under each key, the same object."""
    return len(first) == len(second) and all(key in first and first[key] is value for key, value in second.items())
