"""Deferred initialization: every rank has the model on the meta device, and gets only the values of its shards.

Up to a size limit, one rank of each node builds the real model and sends the other ranks their shards, tensor by
tensor. Above the limit, each rank replays the recorded operations of the constructor for the tensors of which it needs
a shard, and no rank builds the real model. There is then one random stream per tensor name, so that the values do not
depend on the layout. If the constructor can't be recorded, a rank must build the real model to find its size. A model
above the limit is then refused.
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
    record_model,
    release_memory,
    replace_tensors,
    tensor_bytes,
    with_data,
)
from paceline.parallel.initialization.node_broadcast import (
    NodeBroadcast,
    is_first_of_node,
    match_rank_zero,
    refuse_unequal_models,
)
from paceline.parallel.initialization.pretrained import PretrainedModel, open_pretrained
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs
from paceline.torch_internals.rng import preserve_rng, seed_all, stream_key

SpecsForModel = Callable[[nn.Module], ShardSpecs]
_NOT_CONSTANT = "depends on random numbers or on parameters"


class InitialValues(Protocol):
    """A source of initial values.

    If `is_local` is True, a rank may call `values` alone and several times, each time for some of the tensors. If it is
    False, all ranks call `values` once, for all tensors. `PretrainedValues` is an exception: its `is_local` is False,
    but a rank may call its `values` alone and several times.
    """

    @property
    def is_local(self) -> bool: ...

    def values(self, shard_specs: ShardSpecs) -> tuple[dict[str, Tensor], list[str]]:
        """Return this rank's shards, by the first name of each tensor that it holds, and notes."""


@dataclass(frozen=True, kw_only=True)
class DeferredInit:
    """A model on the meta device, and the source of its values. `InitialValues` says how often to call `values`."""

    model: nn.Module
    source: InitialValues
    notes: tuple[str, ...] = ()

    def values(self, shard_specs: ShardSpecs) -> tuple[dict[str, Tensor], list[str]]:
        """Return this rank's shards of all parameters and buffers, on its device, and notes.

        Args:
            shard_specs: by the first name of each tensor; a tensor that is not listed is returned in full.
        """
        full_specs = {name: ShardSpec.full(tensor.shape) for name, tensor in named_tensors(self.model).items()}
        return self.source.values({**full_specs, **shard_specs})

    def empty_specs(self) -> ShardSpecs:
        """Return an empty shard spec for each tensor."""
        return {name: ShardSpec.empty(tensor.shape) for name, tensor in named_tensors(self.model).items()}


@dataclass(frozen=True, kw_only=True)
class ReplayedValues:
    """Initial values that are replayed from the tape."""

    recorded: RecordedModel
    device: torch.device
    is_local: bool = True

    def values(self, shard_specs: ShardSpecs) -> tuple[dict[str, Tensor], list[str]]:
        """Compute one full tensor after another on this rank, and keep only its shard."""
        values = {}
        for name, shard_spec in shard_specs.items():
            if shard_spec.local_shape is not None:
                values[name] = self._replay_shard(name, shard_spec).to(self.device)
        return values, []

    def _replay_shard(self, name: str, shard_spec: ShardSpec) -> Tensor:
        if name in self.recorded.real_tensors:
            return shard_spec.extract(self.recorded.real_tensors[name])
        full_tensor = self.recorded.tape.compute_values(self.recorded.views[name])[0]
        return full_tensor if shard_spec.is_full and len(shard_spec.boxes) == 1 else shard_spec.extract(full_tensor)


def defer_init(
    build: Callable[[], nn.Module],
    *,
    seed: int,
    world: World,
    limit_bytes: int,
    pretrained: PretrainedModel | None = None,
) -> DeferredInit:
    """Return the model on the meta device, equal on all ranks.

    Args:
        build: builds the model, with a fixed seed; every rank calls it, most of them on the meta device.
        pretrained: the job's `model` if its weights are in files; each rank then reads its shards from them.
        limit_bytes: the limit on the bytes of parameters and buffers. Above the limit, each rank replays the
            constructor tensor by tensor; a model that does not allow this is refused.

    Raises:
        UsageError: the model is above the limit, and its constructor can't be replayed tensor by tensor.
        JobError, DesyncError: `build` returns no model, or ranks have different models.
    """
    if pretrained is not None:
        seed_all(stream_key(seed, "build"))
        source, notes = open_pretrained(pretrained, seed=stream_key(seed, "build"), device=world.device)
        return DeferredInit(model=source.model, source=source, notes=tuple(notes))
    recorded, reason = _try_record(build, seed)
    reasons = world.gather_json(reason)
    if recorded is not None and recorded.num_bytes > limit_bytes and not any(reasons):
        refuse_unequal_models(recorded.model, world=world)
        return _make_replayed_init(recorded, world, limit_bytes)
    refusal = next((text for text in reasons if text), "")
    is_first = is_first_of_node(world)
    model = _check_model(build()) if is_first or recorded is None else recorded.model
    num_bytes = tensor_bytes(model)
    if num_bytes > limit_bytes:
        raise _too_large_error(num_bytes, limit_bytes, refusal)
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model).items()} if is_first else {}
    model = release_memory(model)
    reason = reason or _difference_reason(recorded)
    model, notes = match_rank_zero(
        model, build=build, is_plain=is_first or recorded is None, reason=reason, world=world
    )
    return DeferredInit(
        model=model, source=NodeBroadcast(model=model, tensors=tensors, world=world), notes=tuple(notes)
    )


def defer_large_model(
    build: Callable[[], nn.Module],
    *,
    seed: int,
    world: World,
    limit_bytes: int,
    pretrained: PretrainedModel | None = None,
) -> DeferredInit | None:
    """Return the model on the meta device if it is above the limit, else None.

    Each rank may call `values` of the returned source alone and several times. A model that is not pretrained also
    gives None if some rank cannot record its constructor.

    Raises:
        DesyncError: ranks have different models.
        UsageError: the constructor was recorded, but it can't be replayed tensor by tensor.
    """
    if pretrained is not None:
        seed_all(stream_key(seed, "build"))
        source, notes = open_pretrained(pretrained, seed=stream_key(seed, "build"), device=world.device)
        if tensor_bytes(source.model) <= limit_bytes:
            return None
        return DeferredInit(model=source.model, source=source.with_unsharded_model(), notes=tuple(notes))
    with preserve_rng():
        recorded, reason = _try_record(build, seed)
    if any(world.gather_json(reason)) or recorded is None or recorded.num_bytes <= limit_bytes:
        return None
    refuse_unequal_models(recorded.model, world=world)
    return _make_replayed_init(recorded, world, limit_bytes)


def build_full_model(build: Callable[[], nn.Module], *, seed: int, limit_bytes: int) -> nn.Module:
    """Return the full model in this process, for `single` and `ddp`.

    It is a plain build, or, above the limit, a model with one random stream per tensor name.

    Raises:
        UsageError: the model is above the limit, and its constructor can't be replayed tensor by tensor.
    """
    with preserve_rng():
        recorded, reason = _try_record(build, seed)
    if recorded is not None and recorded.num_bytes > limit_bytes:
        deferred = _make_replayed_init(recorded, World.alone(), limit_bytes)
        fill_model(deferred.model, deferred.values({})[0])
        return deferred.model
    model = _check_model(build())
    if tensor_bytes(model) > limit_bytes:
        raise _too_large_error(tensor_bytes(model), limit_bytes, reason)
    return model


def fill_model(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put full tensors into a model on the meta device; ties, types and attributes of its tensors stay unchanged."""
    meta_tensors = named_tensors(model)
    replace_tensors(
        model,
        {
            name: with_data(meta_tensors[name], value)
            for name, value in values.items()
            if meta_tensors[name].is_meta and value.shape == meta_tensors[name].shape
        },
    )


def _try_record(build: Callable[[], nn.Module], seed: int) -> tuple[RecordedModel | None, str]:
    try:
        return record_model(build, seed=seed), ""
    except Unrecordable as error:
        return None, str(error)


def _difference_reason(recorded: RecordedModel | None) -> str:
    """Return the reason why a recorded model may differ from the plain one; an empty string if there is none."""
    if recorded is None:
        return ""
    if recorded.unregistered_names:
        return f"{recorded.unregistered_names[0]} is neither parameter nor buffer, and {_NOT_CONSTANT}"
    return recorded.doubts[0] if recorded.doubts else ""


def _make_replayed_init(recorded: RecordedModel, world: World, limit_bytes: int) -> DeferredInit:
    """Return the initialization that replays the tape.

    Raises:
        UsageError: the constructor can't be replayed tensor by tensor. Either too many values come from outside torch,
            or a tensor that is neither parameter nor buffer depends on random numbers or on parameters.
    """
    num_stored_bytes = recorded.tape.constant_bytes + sum(tensor.nbytes for tensor in recorded.real_tensors.values())
    if num_stored_bytes > limit_bytes:
        raise _too_large_error(
            recorded.num_bytes,
            limit_bytes,
            f"{num_stored_bytes:,} bytes of its values come from outside torch (NumPy, a file)",
        )
    unregistered_name = next(iter(recorded.unregistered_names), "")
    if unregistered_name and recorded.num_bytes > limit_bytes:
        raise _too_large_error(
            recorded.num_bytes, limit_bytes, f"{unregistered_name} is neither parameter nor buffer, and {_NOT_CONSTANT}"
        )
    note = (
        f"initial values: {recorded.num_bytes:,} bytes are above init.limit, so each tensor is drawn from a random "
        "stream of its name; below the limit the values equal those of a plain build"
    )
    return DeferredInit(
        model=recorded.model, source=ReplayedValues(recorded=recorded, device=world.device), notes=(note,)
    )


def _too_large_error(num_bytes: int, limit_bytes: int, reason: str) -> UsageError:
    return UsageError(
        f"the model has {num_bytes:,} bytes, which is above init.limit ({limit_bytes:,}), and its constructor can't be "
        "replayed tensor by tensor.",
        cause=reason,
        hint=f"--init.limit {num_bytes} to build the full model at the start",
    )


def _check_model(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model= returned a {type(model).__name__}, expected a torch.nn.Module.", hint="model=lambda: MyModel()"
        )
    return model
