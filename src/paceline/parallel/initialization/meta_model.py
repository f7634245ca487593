"""A model on the meta device: its recording, the comparison of two builds, and the replacement of its tensors."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.errors import user_line
from paceline.parallel.initialization.init_tape import InitTape, RecordedView, Unrecordable
from paceline.parallel.initialization.record_mode import has_no_memory, record_init
from paceline.parallel.module_access.user_hooks import refuse_hooks
from paceline.torch_internals.private_api import module_registries, of_type

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 4


@dataclass(frozen=True, kw_only=True)
class RecordedModel:
    """A model built on the meta device, and the tape of its constructor.

    `views` locate the recorded tensors on the tape; `real_tensors` were not recorded. `unregistered_names` are random
    tensors that are neither parameter nor buffer; `doubts` are reasons why a plain build may differ.
    """

    model: nn.Module
    tape: InitTape
    views: Mapping[str, RecordedView]
    real: Mapping[str, Tensor]
    loose: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all parameters and buffers."""
        return tensor_bytes(self.model)


def record(build: Callable[[], nn.Module], *, seed: int) -> RecordedModel:
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
        raise Unrecordable(f"{type(error).__name__}: {error}" + (f" (at {line})" if line else "")) from error
    tensors = named_tensors(model)
    views = {name: RecordedView.of(tensor) for name, tensor in tensors.items() if has_no_memory(tensor)}
    tape.name_draws(list(views.items()))
    real = {name: tensor.detach() for name, tensor in tensors.items() if not has_no_memory(tensor)}
    loose = tuple(_filled(model, tape, own={id(tensor) for tensor in tensors.values()}))
    release_memory(model)
    return RecordedModel(model=model, tape=tape, views=views, real=real, loose=loose, doubts=tuple(doubts))


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
    put_tensors(model, {name: empty_like(tensor) for name, tensor in tensors.items()})
    return model


def empty_like(tensor: Tensor) -> Tensor:
    """Return the same tensor on the meta device."""
    return with_data(tensor, tensor.detach().to("meta"))


def with_data(like: Tensor, data: Tensor) -> Tensor:
    """Return `data` as a parameter or buffer with the type and attributes of `like`."""
    found = of_type(data, like=like)
    vars(found).update(vars(like))
    return found


def put_tensors(model: nn.Module, news: Mapping[str, Tensor]) -> None:
    """Replace the tensors with these first names everywhere: also tied ones, and those in lists and dicts."""
    old = named_tensors(model)
    change = {id(old[name]): tensor for name, tensor in news.items()}
    for module in model.modules():
        for holder in module_registries(module):
            for name, tensor in list(holder.items()):
                if tensor is not None and id(tensor) in change:
                    holder[name] = change[id(tensor)]
        for _, held, place, tensor in _attributes(module):
            if id(tensor) in change:
                held[place] = change[id(tensor)]


def _filled(model: nn.Module, tape: InitTape, *, own: set[int]) -> Iterator[str]:
    """Compute the tensors in plain attributes, and yield the names of those that depend on random draws."""
    for prefix, module in model.named_modules():
        for name, holder, place, tensor in list(_attributes(module)):
            if id(tensor) in own or not has_no_memory(tensor):
                continue
            view = RecordedView.of(tensor)
            if tape.draws(view) or tensor.grad_fn is not None:
                yield f"{prefix}.{name}" if prefix else name
            holder[place] = tape.values(view)[0]


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield tensors in plain attributes of a module, also in lists and dicts: name, holder, place, tensor."""
    for name, value in list(vars(module).items()):
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from _held(name, vars(module), name, value, depth=0)


def _held(name: str, holder: Any, place: Any, value: Any, *, depth: int) -> Iterator[tuple[str, Any, Any, Tensor]]:
    if isinstance(value, Tensor):
        yield name, holder, place, value
    elif depth < _DEEPEST and isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _held(f"{name}[{index}]", value, index, inner, depth=depth + 1)
    elif depth < _DEEPEST and isinstance(value, MutableMapping):
        for key, inner in list(value.items()):
            yield from _held(f"{name}[{key!r}]", value, key, inner, depth=depth + 1)


def described(model: nn.Module) -> dict[str, str]:
    """Return a description for comparing builds: types, shapes and ties of tensors, classes and values of modules."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if id(tensor) in first:
            found[name] = f"tied to {first[id(tensor)]}"
            continue
        first[id(tensor)] = name
        trains = "trainable" if tensor.requires_grad else "constant"
        found[name] = f"{type(tensor).__name__}, {str(tensor.dtype)[6:]}{list(tensor.shape)}, {trains}"
    for prefix, module in model.named_modules():
        found[f"{prefix}()"] = type(module).__qualname__
        for name, value in vars(module).items():
            text = _plain(value, _DEEPEST)
            if text:
                found[f"{prefix}.{name}"] = text
    return found


def digest(description: Mapping[str, str]) -> str:
    """Return a short hash, equal only for equal descriptions."""
    return hashlib.blake2b(repr(sorted(description.items())).encode(), digest_size=16).hexdigest()


def _plain(value: Any, depth: int) -> str:
    """Return a value as text if it is a number, a string, or a nested container of them; else an empty string."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth and isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(inner, depth - 1) for inner in value) + "]"
    if depth and isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_plain(inner, depth - 1)}" for key, inner in value.items()) + "}"
    return ""
