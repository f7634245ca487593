"""Build a model on the meta device, compare two builds, and replace a model's tensors."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.errors import user_line
from paceline.parallel.initialization.init_tape import InitTape, RecordedView, Unrecordable
from paceline.parallel.initialization.record_mode import is_on_meta, record_init
from paceline.parallel.module_access.user_hooks import refuse_hooks
from paceline.torch_internals.private_api import make_subclass, module_registries

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
_MAX_DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class RecordedModel:
    """A model built on the meta device, and the tape of its constructor.

    `views` locate the recorded tensors on the tape; `real_tensors` were not recorded. `unregistered_names` are tensors
    that are neither parameter nor buffer, and that depend on random numbers or on parameters. `doubts` are reasons why
    a plain build may give other values.
    """

    model: nn.Module
    tape: InitTape
    views: Mapping[str, RecordedView]
    real_tensors: Mapping[str, Tensor]
    unregistered_names: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all parameters and buffers."""
        return tensor_bytes(self.model)


def record_model(build: Callable[[], nn.Module], *, seed: int) -> RecordedModel:
    """Build a model on the meta device, and record the operations.

    Raises:
        Unrecordable: the constructor cannot run on the meta device; the text gives the reason and the line.
    """
    tape = InitTape(seed=seed)
    try:
        with record_init(tape) as doubts:
            model = build()
    except Exception as error:
        line = user_line(error)
        reason = str(error) if isinstance(error, Unrecordable) else f"{type(error).__name__}: {error}"
        raise Unrecordable(reason + (f" (at {line})" if line else "")) from error
    tensors = named_tensors(model)
    views = {name: RecordedView.from_tensor(tensor) for name, tensor in tensors.items() if is_on_meta(tensor)}
    tape.assign_random_streams(list(views.items()))
    real_tensors = {name: tensor.detach() for name, tensor in tensors.items() if not is_on_meta(tensor)}
    unregistered_names = tuple(
        _fill_attributes(model, tape, registered_ids={id(tensor) for tensor in tensors.values()})
    )
    release_memory(model)
    return RecordedModel(
        model=model,
        tape=tape,
        views=views,
        real_tensors=real_tensors,
        unregistered_names=unregistered_names,
        doubts=tuple(doubts),
    )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and all buffers by name; a tied tensor appears once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def tensor_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, with memory or without."""
    return sum(tensor.nbytes for tensor in named_tensors(model).values())


def release_memory(model: nn.Module) -> nn.Module:
    """Move the model to the meta device; the tensors' types, attributes and ties stay unchanged."""
    tensors = named_tensors(model)
    refuse_hooks(tensors)
    replace_tensors(model, {name: meta_like(tensor) for name, tensor in tensors.items()})
    return model


def meta_like(tensor: Tensor) -> Tensor:
    """Return the same tensor on the meta device."""
    return with_data(tensor, tensor.detach().to("meta"))


def with_data(like: Tensor, data: Tensor) -> Tensor:
    """Return `data` as a parameter or buffer with the type and attributes of `like`."""
    tensor = make_subclass(data, like=like)
    vars(tensor).update(vars(like))
    return tensor


def replace_tensors(model: nn.Module, replacements: Mapping[str, Tensor]) -> None:
    """Replace parameters and buffers of the model; `replacements` gives the new tensor for the first name of each.

    A tensor is replaced under all its names, and also in plain attributes, lists and dicts of the modules.
    """
    old = named_tensors(model)
    replacement_by_id = {id(old[name]): tensor for name, tensor in replacements.items()}
    for module in model.modules():
        for registry in module_registries(module):
            for name, tensor in list(registry.items()):
                if tensor is not None and id(tensor) in replacement_by_id:
                    registry[name] = replacement_by_id[id(tensor)]
        for _, container, key, tensor in _attribute_tensors(module):
            if id(tensor) in replacement_by_id:
                container[key] = replacement_by_id[id(tensor)]


def _fill_attributes(model: nn.Module, tape: InitTape, *, registered_ids: set[int]) -> Iterator[str]:
    """Compute the tensors in plain attributes; yield the names of those that depend on random draws or parameters."""
    for prefix, module in model.named_modules():
        for name, container, key, tensor in list(_attribute_tensors(module)):
            if id(tensor) in registered_ids or not is_on_meta(tensor):
                continue
            view = RecordedView.from_tensor(tensor)
            if tape.depends_on_random(view) or tensor.grad_fn is not None:
                yield f"{prefix}.{name}" if prefix else name
            container[key] = tape.compute_values(view)[0]


def _attribute_tensors(module: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield the tensors in a module's plain attributes, also in lists and dicts: (name, container, key, tensor)."""
    for name, value in list(vars(module).items()):
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from _nested_tensors(name, vars(module), name, value, depth=0)


def _nested_tensors(
    name: str, container: Any, key: Any, value: Any, *, depth: int
) -> Iterator[tuple[str, Any, Any, Tensor]]:
    if isinstance(value, Tensor):
        yield name, container, key, value
    elif depth < _MAX_DEPTH and isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _nested_tensors(f"{name}[{index}]", value, index, inner, depth=depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, MutableMapping):
        for key, inner in list(value.items()):
            yield from _nested_tensors(f"{name}[{key!r}]", value, key, inner, depth=depth + 1)


def describe_model(model: nn.Module) -> dict[str, str]:
    """Return a description for comparing builds: types, shapes and ties of tensors, classes and values of modules."""
    first_names: dict[int, str] = {}
    description: dict[str, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if id(tensor) in first_names:
            description[name] = f"tied to {first_names[id(tensor)]}"
            continue
        first_names[id(tensor)] = name
        trainability = "trainable" if tensor.requires_grad else "constant"
        description[name] = f"{type(tensor).__name__}, {str(tensor.dtype)[6:]}{list(tensor.shape)}, {trainability}"
    for prefix, module in model.named_modules():
        description[f"{prefix}()"] = type(module).__qualname__
        for name, value in vars(module).items():
            text = _plain_text(value, _MAX_DEPTH)
            if text:
                description[f"{prefix}.{name}"] = text
    return description


def hash_description(description: Mapping[str, str]) -> str:
    """Return a short hash, equal only for equal descriptions."""
    return hashlib.blake2b(repr(sorted(description.items())).encode(), digest_size=16).hexdigest()


def _plain_text(value: Any, depth: int) -> str:
    """Return a value as text if it is a number, a string, or a nested container of them; else an empty string."""
    if isinstance(value, _PLAIN_TYPES):
        return repr(value)
    if depth and isinstance(value, list | tuple):
        return "[" + ", ".join(_plain_text(inner, depth - 1) for inner in value) + "]"
    if depth and isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_plain_text(inner, depth - 1)}" for key, inner in value.items()) + "}"
    return ""
