"""The initial model of a run before placement: the full model, or only this rank's shards of a large model."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from paceline.comm.mesh_groups import MeshGroups
from paceline.errors import JobError
from paceline.parallel.initialization.deferred_fill import DeferredModel
from paceline.parallel.initialization.deferred_init import build_full_model, defer_init, defer_large_model
from paceline.parallel.initialization.meta_model import named_tensors, replace_tensors, tensor_bytes, with_data
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.parallel.sharding.fully_sharded import row_shard_specs
from paceline.planner.layout.mesh import Mesh
from paceline.torch_internals.rng import get_states, set_states

SMALL_BYTES = 256 << 20

Build = Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    """A model and, if its sharded parameters have no memory yet, this rank's rows of them.

    If the model must run before its sharding is known, no parameter has memory yet, and `deferred_model` fills in this
    rank's values once the shards are known. `notes` describe how the model was initialised.
    """

    model: nn.Module
    rows: dict[str, Tensor] | None = None
    late: DeferredModel | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True if this rank holds the whole model."""
        return self.rows is None and self.late is None

    def on(self, device: torch.device) -> nn.Module:
        """Return the model on `device`. A model with rows or deferred values is already there."""
        return self.model.to(device) if self.is_whole else self.model


class _Large(BaseException):
    """The build has passed the limit. A `BaseException`, so that a constructor's `except Exception` can't catch it."""


def begin_whole(build: Build, *, seed: int, limit_bytes: int, stored: PretrainedModel | None = None) -> nn.Module:
    """Return the full model: from a plain build up to the limit, above it with each tensor drawn by its own seed.

    Raises:
        JobError: `build` returns no model. UsageError: above the limit, and the constructor can't be recorded.
    """
    if stored is not None:
        return build()
    model = _built(build, most=limit_bytes)
    if model is not None and tensor_bytes(model) <= limit_bytes:
        return model
    del model
    gc.collect()  # a module whose constructor was interrupted may be in a reference cycle
    return build_full_model(build, seed=seed, limit_bytes=limit_bytes)


def build_initial_model(
    build: Build, *, seed: int, limit_bytes: int, worlds: MeshGroups, stored: PretrainedModel | None = None
) -> InitialModel:
    """Return the model of this rank; every rank must call this. `build` is the plain, seeded build.

    Each rank builds the full model up to `SMALL_BYTES`, or if it holds the full model in this layout. If a forward
    determines the shards, each rank builds the full model up to the limit.

    Raises:
        JobError, UsageError, DesyncError: no model, one that can't be built in shards, or a different one on a rank.
    """
    if worlds.all_ranks.is_simulated:
        return InitialModel(model=build())
    if not holds_parts(worlds.mesh):
        return _whole(build, seed=seed, limit_bytes=limit_bytes, stored=stored)
    model = _built(build, most=min(SMALL_BYTES, limit_bytes))
    if model is not None and tensor_bytes(model) > limit_bytes:
        model = None
    if not any(worlds.all_ranks.gather_json(model is None)):
        assert model is not None
        return InitialModel(model=model)
    del model
    if not holds_rows(worlds.mesh):
        found = defer_large_model(build, seed=seed, world=worlds.all_ranks, limit_bytes=limit_bytes, pretrained=stored)
        if found is None:
            return _whole(build, seed=seed, limit_bytes=limit_bytes, stored=stored)
        return InitialModel(
            model=found.model,
            late=DeferredModel(deferred_init=found, device=worlds.all_ranks.device),
            notes=found.notes,
        )
    made = defer_init(build, seed=seed, world=worlds.all_ranks, limit_bytes=limit_bytes, pretrained=stored)
    if made.source.is_local:
        return InitialModel(
            model=made.model, late=DeferredModel(deferred_init=made, device=worlds.all_ranks.device), notes=made.notes
        )
    parts = row_shard_specs(made.model, world=worlds.shard)
    values, notes = made.values(parts)
    old = named_tensors(made.model)
    replace_tensors(made.model, {n: with_data(old[n], value) for n, value in values.items() if n not in parts})
    rows = {name: value for name, value in values.items() if name in parts}
    return InitialModel(model=made.model, rows=rows, notes=(*made.notes, *notes))


def _whole(build: Build, *, seed: int, limit_bytes: int, stored: PretrainedModel | None) -> InitialModel:
    whole = begin_whole(build, seed=seed, limit_bytes=limit_bytes, stored=stored)
    return InitialModel(model=whole, notes=_by_name(whole, limit_bytes) if stored is None else ())


def _by_name(model: nn.Module, limit_bytes: int) -> tuple[str, ...]:
    num_bytes = tensor_bytes(model)
    if num_bytes <= limit_bytes:
        return ()
    return (
        f"initial values: {num_bytes:,} bytes are above init.limit, so each tensor is drawn "
        "separately, seeded by its name",
    )


def holds_parts(mesh: Mesh) -> bool:
    """Return True if no rank holds the full model."""
    return mesh.zero == 3 or mesh.pp > 1 or mesh.tp > 1 or mesh.ep > 1


def holds_rows(mesh: Mesh) -> bool:
    """Return True if a rank holds only rows of the parameters, so that no rank ever builds the full model."""
    return mesh.zero == 3 and mesh.pp == mesh.tp == mesh.cp == mesh.ep == 1


def _built(build: Build, *, most: int) -> nn.Module | None:
    """Return a plain build, or None if it exceeds `max_bytes`."""
    states = get_states()
    with _gauge(most):
        try:
            model = build()
        except _Large:
            set_states(states)  # so that the next build draws the same numbers
            return None
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model= returned a {type(model).__name__}, expected a torch.nn.Module.", hint="model=lambda: MyModel()"
        )
    return model


@contextmanager
def _gauge(most: int) -> Iterator[None]:
    """Stop a build once its registered parameters exceed `max_bytes`."""
    seen: dict[int, Tensor] = {}
    total = 0

    def weigh(_: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal total
        del name
        if parameter is not None and id(parameter) not in seen and not is_lazy(parameter):
            seen[id(parameter)] = parameter
            total += parameter.numel() * parameter.element_size()  # sparse: no `nbytes`, refused later
            if total > most:
                raise _Large

    handle = register_module_parameter_registration_hook(weigh)
    try:
        yield
    finally:
        handle.remove()
