"""Deferred initialization: every rank has the model on the meta device, and gets only the values of its shards.

Up to a size limit, one rank of each node builds the real model and sends the other ranks their shards, tensor by
tensor. Above the limit no rank builds it: each rank replays the constructor's operations for the tensors of which it
needs a shard. There is one random stream per tensor name, so that the values do not depend on the layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import JobError, UsageError
from paceline.parallel.initialization.init_tape import Unrecordable
from paceline.parallel.initialization.meta_model import (
    RecordedModel,
    named_tensors,
    put_tensors,
    record,
    release_memory,
    tensor_bytes,
    with_data,
)
from paceline.parallel.initialization.node_broadcast import NodeBroadcast, first_of_node, refuse_unequal, same_models
from paceline.parallel.initialization.pretrained import PretrainedModel, from_files
from paceline.parallel.module_access.shard_spec import Parts, ShardSpec
from paceline.torch_internals.rng import preserve_rng, seed_all, stream_key

Wanted = Callable[[nn.Module], Parts]


class StartValues(Protocol):
    """A source of initial values. `is_local`: a rank may call `values` alone, and repeatedly for single tensors."""

    @property
    def apiece(self) -> bool: ...

    def values(self, parts: Parts) -> tuple[dict[str, Tensor], list[str]]:
        """Return this rank's shards, by the first name of each tensor that it holds, and notes."""


@dataclass(frozen=True, kw_only=True)
class DeferredInit:
    """A model on the meta device, and the source of its values. All ranks must call `values`, once."""

    model: nn.Module
    source: StartValues
    notes: tuple[str, ...] = ()

    def values(self, parts: Parts) -> tuple[dict[str, Tensor], list[str]]:
        """Return this rank's shards of all parameters and buffers, on its device, and notes.

        Args:
            shard_specs: by the first name of each tensor; a tensor that is not listed is returned in full.
        """
        whole = {name: ShardSpec.all_of(tensor.shape) for name, tensor in named_tensors(self.model).items()}
        return self.source.values({**whole, **parts})

    def without_values(self) -> Parts:
        """Return shard specs that select nothing of any tensor."""
        return {name: ShardSpec.none_of(tensor.shape) for name, tensor in named_tensors(self.model).items()}


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Initial values that are replayed from the tape."""

    recorded: RecordedModel
    device: torch.device
    apiece: bool = True

    def values(self, parts: Parts) -> tuple[dict[str, Tensor], list[str]]:
        """Compute one full tensor after another on this rank, and keep only its shard."""
        found = {}
        for name, part in parts.items():
            if part.local is not None:
                found[name] = self._part(name, part).to(self.device)
        return found, []

    def _part(self, name: str, part: ShardSpec) -> Tensor:
        if name in self.recorded.real:
            return part.take(self.recorded.real[name])
        whole = self.recorded.tape.values(self.recorded.views[name])[0]
        return whole if part.is_all and len(part.boxes) == 1 else part.take(whole)


def defer_init(
    build: Callable[[], nn.Module], *, seed: int, world: World, limit_bytes: int, stored: PretrainedModel | None = None
) -> DeferredInit:
    """Return the model on the meta device, equal on all ranks.

    Args:
        build: builds the model, with a fixed seed; every rank calls it, most of them on the meta device.
        pretrained: the job's `model` if its weights are in files; each rank then reads its shards from them.
        limit_bytes: the limit on parameters and buffers above which no process builds the full model.

    Raises:
        UsageError: the model is above the limit, and the constructor cannot be recorded.
        JobError, DesyncError: `build` returns no model, or ranks have different models.
    """
    if stored is not None:
        seed_all(stream_key(seed, "build"))
        source, notes = from_files(stored, seed=stream_key(seed, "build"), device=world.device)
        return DeferredInit(model=source.model, source=source, notes=tuple(notes))
    recorded, reason = _tried(build, seed)
    reasons = world.gather_json(reason)
    if recorded is not None and recorded.num_bytes > limit_bytes and not any(reasons):
        refuse_unequal(recorded.model, world=world)
        return _replayed(recorded, world, limit_bytes)
    refused = next((text for text in reasons if text), "")
    is_first = first_of_node(world)
    model = _checked(build()) if is_first or recorded is None else recorded.model
    num_bytes = tensor_bytes(model)
    if num_bytes > limit_bytes:
        raise _too_large(num_bytes, limit_bytes, refused)
    held = {name: tensor.detach() for name, tensor in named_tensors(model).items()} if is_first else {}
    model = release_memory(model)
    reason = reason or _loose(recorded)
    model, notes = same_models(model, build=build, is_plain=is_first or recorded is None, reason=reason, world=world)
    return DeferredInit(model=model, source=NodeBroadcast(model=model, held=held, world=world), notes=tuple(notes))


def defer_large_model(
    build: Callable[[], nn.Module], *, seed: int, world: World, limit_bytes: int, stored: PretrainedModel | None = None
) -> DeferredInit | None:
    """Return the model on the meta device if it is above the limit; then each rank may get values alone, repeatedly.

    Return None if it is below the limit, or if some rank cannot record the constructor.

    Raises:
        DesyncError: ranks have different models.
        UsageError: the model has too many values that cannot be replayed.
    """
    if stored is not None:
        seed_all(stream_key(seed, "build"))
        source, notes = from_files(stored, seed=stream_key(seed, "build"), device=world.device)
        if tensor_bytes(source.model) <= limit_bytes:
            return None
        return DeferredInit(model=source.model, source=source.apart(), notes=tuple(notes))
    with preserve_rng():
        recorded, reason = _tried(build, seed)
    if any(world.gather_json(reason)) or recorded is None or recorded.num_bytes <= limit_bytes:
        return None
    refuse_unequal(recorded.model, world=world)
    return _replayed(recorded, world, limit_bytes)


def drawn_start(build: Callable[[], nn.Module], *, seed: int, limit_bytes: int) -> nn.Module:
    """Return the full model in this process, for `single` and `ddp`.

    It is a plain build, or, above the limit, a model with one random stream per tensor name.

    Raises:
        UsageError: the model is above the limit, and the constructor cannot be recorded.
    """
    with preserve_rng():
        recorded, reason = _tried(build, seed)
    if recorded is not None and recorded.num_bytes > limit_bytes:
        made = _replayed(recorded, World.alone(), limit_bytes)
        fill_model(made.model, made.values({})[0])
        return made.model
    model = _checked(build())
    if tensor_bytes(model) > limit_bytes:
        raise _too_large(tensor_bytes(model), limit_bytes, reason)
    return model


def fill_model(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put full tensors into a model on the meta device; ties, types and attributes of its tensors stay unchanged."""
    old = named_tensors(model)
    put_tensors(
        model,
        {
            name: with_data(old[name], value)
            for name, value in values.items()
            if old[name].is_meta and value.shape == old[name].shape
        },
    )


def _tried(build: Callable[[], nn.Module], seed: int) -> tuple[RecordedModel | None, str]:
    try:
        return record(build, seed=seed), ""
    except Unrecordable as error:
        return None, str(error)


def _loose(recorded: RecordedModel | None) -> str:
    """Return the reason why a recorded model may differ from the plain one; an empty string if there is none."""
    if recorded is None:
        return ""
    if recorded.loose:
        return f"{recorded.loose[0]} is a random tensor that is neither parameter nor buffer"
    return recorded.doubts[0] if recorded.doubts else ""


def _replayed(recorded: RecordedModel, world: World, limit_bytes: int) -> DeferredInit:
    kept = recorded.tape.constant_bytes + sum(tensor.nbytes for tensor in recorded.real.values())
    if kept > limit_bytes:
        raise _too_large(recorded.num_bytes, limit_bytes, f"{kept:,} bytes of it are created outside torch, or read")
    loose = next(iter(recorded.loose), "")
    if loose and recorded.num_bytes > limit_bytes:
        raise _too_large(recorded.num_bytes, limit_bytes, f"{loose} is neither parameter nor buffer, and is random")
    note = (
        f"initial values: {recorded.num_bytes:,} bytes are above init.limit, so each tensor is drawn from a random "
        "stream of its name; below the limit the values equal those of a plain build"
    )
    return DeferredInit(model=recorded.model, source=Replayed(recorded=recorded, device=world.device), notes=(note,))


def _too_large(num_bytes: int, limit_bytes: int, reason: str) -> UsageError:
    return UsageError(
        f"the model has {num_bytes:,} bytes, init.limit is {limit_bytes:,}, and its constructor can't be recorded.",
        cause=reason,
        hint=f"--init.limit {num_bytes} to build it whole at the start",
    )


def _checked(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model= returned a {type(model).__name__}, expected a torch.nn.Module.", hint="model=lambda: MyModel()"
        )
    return model
