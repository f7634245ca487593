"""Detection of state that a forward sets on its modules between their calls; a graph contains only the calls."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.module_access.user_call_isolation import is_plain, plain_state, plain_value
from paceline.user_code import is_user_file


class ModeChangeCheck:
    """A check, at each call of a unit and at the end, that only the units' own forwards changed their modules.

    `before` and `after` are the state of the opened modules that persists between forwards. It is read
    inside the forward, because torch.export restores most of the attributes that a forward sets.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        self._left: list[tuple[dict[str, Any], str, Any]] = []
        self._found = ""
        self._units_entered = 0
        modules = dict(model.named_modules())
        self._parts = {unit: _named(unit, modules[unit]) for unit in units}
        self._known: dict[int, dict[str, Any]] = {}
        self._modules, self._hooks = modules, _hooks(modules)
        self._opened = {name: part for name, part in modules.items() if not _is_inside(name, units)}
        self._handles = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end),
        ]
        for unit in units:
            self._handles += [
                modules[unit].register_forward_pre_hook(self._before(unit), prepend=True),
                modules[unit].register_forward_hook(self._after(unit), always_call=True),
            ]

    def close(self) -> None:
        """Remove the module hooks."""
        for handle in self._handles:
            handle.remove()

    def refuse(self) -> None:
        """Raise if the check found a change; call this after the forward.

        Raises:
            LayoutError: the forward changed a module; the message names the first module and attribute.
        """
        self.close()
        self._found = self._found or self.hooked
        if self._found:
            raise LayoutError(
                f"the forward sets self.{self._found} between calls of its modules, but stages "
                "along a graph only make the "
                "calls.",
                cause="a pass in eval mode, without tracking or with another momentum within the training forward; "
                "layers that it freezes or thaws; functional_call with other parameters; a value left on a module",
                hint="give the module what it needs as an argument; or --layout ddp or fsdp",
            )

    @property
    def is_between_units(self) -> bool:
        """Return whether the forward is outside all units, where its operations become steps of the graph."""
        return self._units_entered == 0

    @property
    def found(self) -> str:
        """Return the first attribute that the forward has set between calls; "" if there is none."""
        return self._found

    @property
    def hooked(self) -> str:
        """Return the first module on which the forward has added or removed hooks; "" if there is none."""
        hooked = [name for name, hooks in _hooks(self._modules).items() if hooks != self._hooks.get(name)]
        return f"{hooked[0]}.register_hook".lstrip(".") if hooked else ""

    @contextmanager
    def only_hearing(self) -> Iterator[None]:
        """Return a context for a second forward, which checks that the hooks added by the first forward only observe.

        The exported graph contains the values that such hooks store, and a stage has no hooks.

        Raises:
            LayoutError: a hook changes something, or is a backward hook.
        """
        hooked, changing = self.hooked, list[object]()

        def heard(hook: Callable[..., Any]) -> Callable[..., Any]:
            def only(*args: Any, **kwargs: Any) -> Any:
                given = hook(*args, **kwargs)
                changing.extend([] if given is None else [hook])
                return given

            return only

        for name, module in self._modules.items():
            before = self._hooks.get(name, frozenset())
            changing += [key for key in module._backward_hooks if key not in before]
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key in hooks.keys() - before:
                    hooks[key] = heard(hooks[key])
        yield
        if changing:
            self._found = hooked
            self.refuse()

    @property
    def changed(self) -> str:
        """Return the first state that the forward has changed; "" if there is none."""
        return next((name for name in {**self.before, **self.after} if _differs(self.before, self.after, name)), "")

    def settle(self) -> None:
        """Set the attributes of the modules to their values at the end of the forward."""
        for attributes, key, value in self._left:
            attributes[key] = value

    def _begin(self, *_: Any) -> None:
        self.before = _kept(self._opened)
        self._learn(self._parts)

    def _end(self, *_: Any) -> None:
        for unit in self._parts:
            self._look(unit)
        self.after = _kept(self._opened)
        self._left = [
            (vars(part), key, copy.deepcopy(value))
            for name, part in self._opened.items()
            for key, value in vars(part).items()
            if is_plain(value) and _differs(self.before, self.after, f"self.{name}.{key}".replace("..", "."))
        ]

    def _before(self, unit: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._units_entered += 1
            if torch.is_grad_enabled():  # a forward under no_grad is exported operation by operation
                self._look(unit)

        return hook

    def _after(self, unit: str) -> Callable[..., None]:
        """Return the hook that accepts changes by a unit's own forward, which also happen on its stage."""

        def hook(*_: Any) -> None:
            self._units_entered -= 1
            self._learn([unit])

        return hook

    def _learn(self, units: Iterable[str]) -> None:
        for unit in units:
            self._known |= {id(part): _state(part) for part in self._parts[unit].values()}

    def _look(self, unit: str) -> None:
        for name, part in self._parts[unit].items():
            before, now = self._known.get(id(part)), _state(part)
            if before is None or self._found:
                return
            key = next((key for key in {**before, **now} if _differs(before, now, key)), "")
            self._found = f"{name}.{key}" if key else ""


def _named(unit: str, module: nn.Module) -> dict[str, nn.Module]:
    return {f"{unit}.{own}".rstrip("."): part for own, part in module.named_modules()}


def _is_inside(name: str, units: Sequence[str]) -> bool:
    return f"{name}.".startswith(tuple(f"{unit}." for unit in units))


def _differs(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> bool:
    return (name in before) != (name in after) or before.get(name) != after.get(name)


def _kept(opened: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the state of these modules that persists between forwards: attributes, `requires_grad`, globals."""
    found = {f"self.{name}": value for name, value in plain_state(opened).items()}
    for name, module in opened.items():
        for key, parameter in module.named_parameters(name, recurse=False):
            found[f"self.{key}.requires_grad"] = parameter.requires_grad
        code = getattr(type(module).forward, "__code__", None)
        if code is not None and is_user_file(code.co_filename):
            space = type(module).forward.__globals__
            found |= {
                key: plain_value(space[key], {}) for key in code.co_names if key in space and is_plain(space[key])
            }
    return found


def _state(module: nn.Module) -> dict[str, Any]:
    """Return a module's plain attributes, mode, tensor identities and `requires_grad` flags."""
    found = plain_state({"": module}) | {"training": module.training}
    found |= {name: id(tensor) for name, tensor in {**module._parameters, **module._buffers}.items()}
    return found | {f"{name}.requires_grad": p.requires_grad for name, p in module._parameters.items() if p is not None}


def _hooks(modules: Mapping[str, nn.Module]) -> dict[str, frozenset[int]]:
    """Return the ids of each module's hooks."""
    return {
        name: frozenset([*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks])
        for name, module in modules.items()
    }
