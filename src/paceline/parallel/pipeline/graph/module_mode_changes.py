"""Detection of state that a forward sets on its modules between their calls, which an exported graph would lose."""

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
    """A check that only a unit's own forward changes the unit; it runs at each call of a unit and at the end.

    A unit is a module that stays whole in the graph; modules outside all units are opened modules. `changed_attribute`
    is the first attribute of a unit that was set between the calls; "" if there is none. The state of opened modules
    that persists between forwards is read inside the forward, because torch.export restores most of the attributes that
    a forward sets.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self.changed_attribute = ""
        self._state_before: dict[str, Any] = {}
        self._state_after: dict[str, Any] = {}
        self._final_values: list[tuple[dict[str, Any], str, Any]] = []
        self._num_units_entered = 0
        modules = dict(model.named_modules())
        self._modules_of_unit = {unit: _submodules_by_name(unit, modules[unit]) for unit in units}
        self._recorded_states: dict[int, dict[str, Any]] = {}
        self._modules, self._hook_ids_before = modules, _hook_ids(modules)
        self._opened_modules = {name: module for name, module in modules.items() if not _is_inside(name, units)}
        self._handles = [
            model.register_forward_pre_hook(self._start_forward, prepend=True),
            model.register_forward_hook(self._finish_forward),
        ]
        for unit in units:
            self._handles += [
                modules[unit].register_forward_pre_hook(self._enter_unit_hook(unit), prepend=True),
                modules[unit].register_forward_hook(self._leave_unit_hook(unit), always_call=True),
            ]

    def close(self) -> None:
        """Remove the module hooks."""
        for handle in self._handles:
            handle.remove()

    def refuse_changes(self) -> None:
        """Raise if the check found a change; call this after the forward.

        Raises:
            LayoutError: the forward changed a module; the message names the first module and attribute.
        """
        self.close()
        self.changed_attribute = self.changed_attribute or self.changed_hooks
        if self.changed_attribute:
            raise LayoutError(
                f"the forward sets self.{self.changed_attribute} between calls of its modules, but stages "
                "along a graph only make the calls.",
                cause="a pass in eval mode, without tracking or with another momentum within the training forward; "
                "layers that it freezes or unfreezes; functional_call with other parameters; "
                "a value stored on a module",
                hint="give the module what it needs as an argument; or --layout ddp or fsdp",
            )

    @property
    def is_between_units(self) -> bool:
        """Return whether the forward is outside all units, where its operations become steps of the graph."""
        return self._num_units_entered == 0

    @property
    def changed_hooks(self) -> str:
        """Return the first module whose hooks the forward has changed, as `name.register_hook`; "" if there is none."""
        names = [name for name, ids in _hook_ids(self._modules).items() if ids != self._hook_ids_before.get(name)]
        return f"{names[0]}.register_hook".lstrip(".") if names else ""

    @contextmanager
    def require_observing_hooks(self) -> Iterator[None]:
        """Raise if a hook that the first forward added does more than observe; the `with` body runs a second forward.

        Hooks that only observe are accepted: the exported graph contains the values that they store. The forward added
        all these hooks to a copy of the model, so the modules of the stages do not have them, and a change that a hook
        makes would be lost there.

        Raises:
            LayoutError: a hook changes something, or is a backward hook.
        """
        changed_hooks, changing_hooks = self.changed_hooks, list[object]()

        def record_result(hook: Callable[..., Any]) -> Callable[..., Any]:
            def call_hook(*args: Any, **kwargs: Any) -> Any:
                result = hook(*args, **kwargs)
                if result is not None:
                    changing_hooks.append(hook)
                return result

            return call_hook

        for name, module in self._modules.items():
            ids_before = self._hook_ids_before.get(name, frozenset())
            changing_hooks += [hook_id for hook_id in module._backward_hooks if hook_id not in ids_before]
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook_id in hooks.keys() - ids_before:
                    hooks[hook_id] = record_result(hooks[hook_id])
        yield
        if changing_hooks:
            self.changed_attribute = changed_hooks
            self.refuse_changes()

    @property
    def changed_state(self) -> str:
        """Return the first persistent state that the forward has changed; "" if there is none."""
        return _first_difference(self._state_before, self._state_after)

    def apply_final_values(self) -> None:
        """Set the attributes of the modules to their values at the end of the forward."""
        for attributes, key, value in self._final_values:
            attributes[key] = value

    def _start_forward(self, *_: Any) -> None:
        self._state_before = _persistent_state(self._opened_modules)
        self._record_states(self._modules_of_unit)

    def _finish_forward(self, *_: Any) -> None:
        for unit in self._modules_of_unit:
            self._find_change(unit)
        self._state_after = _persistent_state(self._opened_modules)
        self._final_values = [
            (vars(module), key, copy.deepcopy(value))
            for name, module in self._opened_modules.items()
            for key, value in vars(module).items()
            if is_plain(value) and self._is_changed(f"self.{name}.{key}".replace("..", "."))
        ]

    def _is_changed(self, name: str) -> bool:
        return _is_different(self._state_before, self._state_after, name)

    def _enter_unit_hook(self, unit: str) -> Callable[..., None]:
        """Return the hook that looks for changes which the forward made before it called a unit."""

        def hook(*_: Any) -> None:
            self._num_units_entered += 1
            if torch.is_grad_enabled():  # a unit that is called under no_grad is exported operation by operation
                self._find_change(unit)

        return hook

    def _leave_unit_hook(self, unit: str) -> Callable[..., None]:
        """Return the hook that accepts changes by a unit's own forward, which also happen on its stage."""

        def hook(*_: Any) -> None:
            self._num_units_entered -= 1
            self._record_states([unit])

        return hook

    def _record_states(self, units: Iterable[str]) -> None:
        for unit in units:
            self._recorded_states |= {id(m): _module_state(m) for m in self._modules_of_unit[unit].values()}

    def _find_change(self, unit: str) -> None:
        """Set `changed_attribute` if a module of the unit differs from its recorded state."""
        for name, module in self._modules_of_unit[unit].items():
            recorded_state, state = self._recorded_states.get(id(module)), _module_state(module)
            if recorded_state is None or self.changed_attribute:
                return
            key = _first_difference(recorded_state, state)
            self.changed_attribute = f"{name}.{key}" if key else ""


def _submodules_by_name(unit: str, module: nn.Module) -> dict[str, nn.Module]:
    return {f"{unit}.{name}".rstrip("."): submodule for name, submodule in module.named_modules()}


def _is_inside(name: str, units: Sequence[str]) -> bool:
    return f"{name}.".startswith(tuple(f"{unit}." for unit in units))


def _is_different(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> bool:
    return (name in before) != (name in after) or before.get(name) != after.get(name)


def _first_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return next((name for name in {**before, **after} if _is_different(before, after, name)), "")


def _persistent_state(opened_modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the state of these modules that persists between forwards: attributes, `requires_grad`, globals."""
    state = {f"self.{name}": value for name, value in plain_state(opened_modules).items()}
    for module_name, module in opened_modules.items():
        for name, parameter in module.named_parameters(module_name, recurse=False):
            state[f"self.{name}.requires_grad"] = parameter.requires_grad
        code = getattr(type(module).forward, "__code__", None)
        if code is not None and is_user_file(code.co_filename):
            module_globals = type(module).forward.__globals__
            used_globals = {name: module_globals[name] for name in code.co_names if name in module_globals}
            state |= {name: plain_value(value, {}) for name, value in used_globals.items() if is_plain(value)}
    return state


def _module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's plain attributes, mode, tensor identities and `requires_grad` flags."""
    state = plain_state({"": module}) | {"training": module.training}
    state |= {name: id(tensor) for name, tensor in {**module._parameters, **module._buffers}.items()}
    return state | {f"{name}.requires_grad": p.requires_grad for name, p in module._parameters.items() if p is not None}


def _hook_ids(modules: Mapping[str, nn.Module]) -> dict[str, frozenset[int]]:
    """Return the ids of each module's hooks."""
    return {
        name: frozenset([*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks])
        for name, module in modules.items()
    }
