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
from paceline.torch_internals.rng import get_rng_states, set_rng_states

SMALL_BYTES = 256 << 20  # a model up to this size is built in full on each rank

Build = Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    """A model with its initial values, or the means to fill them in once the model is sharded.

    There are three cases:

    - The model has all its values. `deferred_rows` and `deferred_model` are None.
    - The sharded parameters are on the meta device. `deferred_rows` has this rank's rows of them.
    - The whole model is on the meta device. `deferred_model` fills in this rank's values later. If the model must run
      before its sharding is known, `deferred_model` gives each parameter its values while the parameter is needed.

    `notes` describe how the model was initialised.
    """

    model: nn.Module
    deferred_rows: dict[str, Tensor] | None = None
    deferred_model: DeferredModel | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True if this rank holds the whole model."""
        return self.deferred_rows is None and self.deferred_model is None

    def to(self, device: torch.device) -> nn.Module:
        """Return the model on `device`. A model with rows or deferred values is already there."""
        return self.model.to(device) if self.is_whole else self.model


class _SizeLimitExceeded(BaseException):
    """The size limit of a build is exceeded. An `except Exception` in a constructor can't catch a `BaseException`."""


def build_initial_full_model(
    build: Build, *, seed: int, limit_bytes: int, pretrained: PretrainedModel | None = None
) -> nn.Module:
    """Return the full model. If it is larger than `limit_bytes`, each tensor is drawn with a seed of its own.

    Raises:
        JobError: `build` returns no model.
        UsageError: the model is above the limit, and its constructor can't be replayed tensor by tensor.
    """
    if pretrained is not None:
        return build()
    model = _build_within_limit(build, max_bytes=limit_bytes)
    if model is not None and tensor_bytes(model) <= limit_bytes:
        return model
    del model
    gc.collect()  # a module whose constructor was interrupted may be in a reference cycle
    return build_full_model(build, seed=seed, limit_bytes=limit_bytes)


def build_initial_model(
    build: Build, *, seed: int, limit_bytes: int, worlds: MeshGroups, pretrained: PretrainedModel | None = None
) -> InitialModel:
    """Return the model of this rank. Every rank must call this. `build` returns the full model.

    Each rank builds the full model if the layout does not split the model, or if the model has at most `SMALL_BYTES`.
    If a forward must run before the shards are known, each rank builds full models of up to `limit_bytes`.

    Raises:
        JobError, UsageError, DesyncError: `build` returns no model, or one that can't be built in shards, or different
            models on different ranks.
    """
    if worlds.all_ranks.is_simulated:
        return InitialModel(model=build())
    if not splits_model(worlds.mesh):
        return _build_full_initial_model(build, seed=seed, limit_bytes=limit_bytes, pretrained=pretrained)
    model = _build_within_limit(build, max_bytes=min(SMALL_BYTES, limit_bytes))
    if model is not None and tensor_bytes(model) > limit_bytes:
        model = None
    if not any(worlds.all_ranks.gather_json(model is None)):
        assert model is not None
        return InitialModel(model=model)
    del model
    if not shards_rows_only(worlds.mesh):
        deferred_init = defer_large_model(
            build, seed=seed, world=worlds.all_ranks, limit_bytes=limit_bytes, pretrained=pretrained
        )
        if deferred_init is None:
            return _build_full_initial_model(build, seed=seed, limit_bytes=limit_bytes, pretrained=pretrained)
        return InitialModel(
            model=deferred_init.model,
            deferred_model=DeferredModel(deferred_init=deferred_init, device=worlds.all_ranks.device),
            notes=deferred_init.notes,
        )
    deferred_init = defer_init(build, seed=seed, world=worlds.all_ranks, limit_bytes=limit_bytes, pretrained=pretrained)
    if deferred_init.source.is_local:  # a rank creates its values without other ranks, so it can do so later
        return InitialModel(
            model=deferred_init.model,
            deferred_model=DeferredModel(deferred_init=deferred_init, device=worlds.all_ranks.device),
            notes=deferred_init.notes,
        )
    row_specs = row_shard_specs(deferred_init.model, world=worlds.shard)
    values, notes = deferred_init.values(row_specs)
    tensors = named_tensors(deferred_init.model)
    replace_tensors(
        deferred_init.model, {n: with_data(tensors[n], value) for n, value in values.items() if n not in row_specs}
    )
    rows = {name: value for name, value in values.items() if name in row_specs}
    return InitialModel(model=deferred_init.model, deferred_rows=rows, notes=(*deferred_init.notes, *notes))


def _build_full_initial_model(
    build: Build, *, seed: int, limit_bytes: int, pretrained: PretrainedModel | None
) -> InitialModel:
    model = build_initial_full_model(build, seed=seed, limit_bytes=limit_bytes, pretrained=pretrained)
    return InitialModel(model=model, notes=_init_by_name_notes(model, limit_bytes) if pretrained is None else ())


def _init_by_name_notes(model: nn.Module, limit_bytes: int) -> tuple[str, ...]:
    num_bytes = tensor_bytes(model)
    if num_bytes <= limit_bytes:
        return ()
    return (
        f"initial values: {num_bytes:,} bytes are above init.limit, so each tensor is drawn "
        "separately, seeded by its name",
    )


def splits_model(mesh: Mesh) -> bool:
    """Return True if no rank holds the full model."""
    return mesh.zero == 3 or mesh.pp > 1 or mesh.tp > 1 or mesh.ep > 1


def shards_rows_only(mesh: Mesh) -> bool:
    """Return True if the layout shards the parameters by rows, and has no `pp`, `tp`, `cp` or `ep` axis."""
    return mesh.zero == 3 and mesh.pp == mesh.tp == mesh.cp == mesh.ep == 1


def _build_within_limit(build: Build, *, max_bytes: int) -> nn.Module | None:
    """Return the model that `build` returns, or None if its parameters exceed `max_bytes`."""
    states = get_rng_states()
    with _limit_build_size(max_bytes):
        try:
            model = build()
        except _SizeLimitExceeded:
            set_rng_states(states)  # so that the next build draws the same numbers
            return None
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model= returned a {type(model).__name__}, expected a torch.nn.Module.", hint="model=lambda: MyModel()"
        )
    return model


@contextmanager
def _limit_build_size(max_bytes: int) -> Iterator[None]:
    """Return a context that stops a build once its registered parameters exceed `max_bytes`."""
    counted_parameters: dict[int, Tensor] = {}
    total = 0

    def count_bytes(_: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal total
        del name
        if parameter is not None and id(parameter) not in counted_parameters and not is_lazy(parameter):
            counted_parameters[id(parameter)] = parameter
            total += parameter.numel() * parameter.element_size()  # sparse: no `nbytes`, refused later
            if total > max_bytes:
                raise _SizeLimitExceeded

    handle = register_module_parameter_registration_hook(count_bytes)
    try:
        yield
    finally:
        handle.remove()
