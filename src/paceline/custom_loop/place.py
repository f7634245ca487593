"""`pl.place`: a model in a parallel layout, for training loops that are not a `Job`: GANs, RL, a custom trainer."""

import hashlib
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.config.layout import Layout, LayoutKind, parse_layout
from paceline.config.merge_settings import RequestedSettings, merge
from paceline.config.settings import Settings
from paceline.console.output import print_line
from paceline.custom_loop.existing_world import open_current_world
from paceline.custom_loop.parallel_model import PlacedModel
from paceline.errors import LayoutError, PacelineError, UsageError, raise_all
from paceline.launch.failures.uncaught_exceptions import install_uncaught_hook
from paceline.parallel.initialization.meta_model import tensor_bytes
from paceline.parallel.initialization.unsupported_tensors import refuse_tensors
from paceline.parallel.module_access.broadcast_initial import broadcast_initial_tensors
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.parallelize import parallelize
from paceline.parallel.placement import PlacementRequest
from paceline.parallel.trace_example_forward import Result
from paceline.planner.layout.mesh import Mesh, resolve_mesh
from paceline.planner.layout.pipeline_options import refuse_schedule
from paceline.torch_internals.private_api import recompile_on_hook_changes
from paceline.torch_internals.rng import stream_key
from paceline.trainer.setup.initial_model import build_initial_model

_SUPPORTED_SETTINGS = ("place", "init", "train.compile", "train.backend", "train.timeout_seconds")

_UNSUPPORTED_AXES = {
    "pp": "Paceline itself, not the script, would call forward and backward of each microbatch",
    "cp": "with cp, Paceline distributes slices of each sequence, with labels and positions",
    "ep": "with ep, Paceline reduces the experts' gradients over different ranks than the other gradients",
}


def place(
    build: Callable[[], nn.Module],
    *,
    layout: str | None = None,
    world: World | None = None,
    settings: Mapping[str, Any] | None = None,
    example: Callable[[nn.Module], Any] | None = None,
    device: str = "auto",
) -> PlacedModel:
    """Build a model and place it in a parallel layout. Every rank makes the same call.

    Args:
        build: a function that returns the model. All ranks begin with rank 0's weights.
        layout: any layout without pp, cp, ep or threads. The default is ddp, or single on one rank.
        world: the ranks. The default is torch's default group if there is one, else the ranks that torchrun, srun or
            mpirun started, else this process alone.
        settings: `place.*`, `init.limit`, `train.compile`, `train.backend` and `train.timeout_seconds`.
        example: a function that calls the given model on a small batch. The tensor plan is derived from this call.
        device: `cpu`, `cuda` or `auto`. It has no effect if a world is given or torch has a default group.

    Raises:
        LayoutError, UsageError, Problems: a layout, setting or model that can't be combined.
    """
    hook = install_uncaught_hook()
    try:
        placed = _place(build, layout=layout, world=world, settings=settings, example=example, device=device)
    except BaseException as error:
        if hook is not None:
            hook.restrict_to_error(error)
        raise
    if hook is not None:
        weakref.finalize(placed.model, hook.remove)
    return placed


def _place(
    build: Callable[[], nn.Module],
    *,
    layout: str | None,
    world: World | None,
    settings: Mapping[str, Any] | None,
    example: Callable[[nn.Module], Any] | None,
    device: str,
) -> PlacedModel:
    placement_settings = _merge_settings(settings or {})
    current_world = world or open_current_world(device=device, settings=placement_settings)
    requested_layout = parse_layout(layout or ("single" if current_world.world_size == 1 else "ddp"))
    mesh = _make_mesh(requested_layout, current_world.world_size)
    worlds = MeshGroups.from_mesh(current_world, mesh=mesh)
    recompile_on_hook_changes()
    rng_state = torch.get_rng_state()
    rng_digest = hashlib.blake2b(bytes(rng_state.numpy()), digest_size=8).hexdigest()
    seed = stream_key(current_world.share_json(rng_digest), "place")
    initial_model = build_initial_model(
        partial(_build_and_check, build), seed=seed, limit_bytes=placement_settings.init.limit, worlds=worlds
    )
    model = initial_model.to(current_world.device)
    if tensor_bytes(model) > placement_settings.init.limit:
        # The values of such a model do not come from torch's generator. One draw gives the next model another seed.
        torch.set_rng_state(rng_state)
        torch.rand(1)
    if initial_model.is_whole:
        broadcast_initial_tensors(model, world=current_world)
    all_parameters = [replace(member, parameter=_as_meta(member.parameter)) for member in trainable_parameters(model)]
    # A model that is too large to be built in full on each rank gets its initial values after it is sharded:
    # `deferred_rows` are this rank's rows of the parameters. If the rows are not known yet, `deferred_model` provides
    # this rank's values later. For any other model, both are None.
    request = PlacementRequest(
        layout=requested_layout,
        worlds=worlds,
        example_run=None if example is None else _Example(model=model, function=example),
        report=print_line,
        settings=placement_settings.place,
        is_compiled=placement_settings.train.compile,
        deferred_rows=initial_model.deferred_rows,
        deferred_model=initial_model.deferred_model,
    )
    return PlacedModel(
        model=model,
        parallelized=parallelize(model, request),
        worlds=worlds,
        requested_layout=requested_layout,
        all_parameters=all_parameters,
    )


def _build_and_check(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    if isinstance(model, nn.Module):  # any other type is refused later, with its name
        refuse_tensors(model)
    return model


@dataclass(frozen=True, kw_only=True)
class _Example:
    """The user's `example` function as the object that `parallelize` expects, see `ExampleBatch`."""

    model: nn.Module
    function: Callable[[nn.Module], Any]

    def __call__(self) -> Any:
        return self.function(self.model)

    def run(self, model: nn.Module) -> Any:
        return self.function(model)

    def once(self, key: Hashable, find: Callable[[], Result]) -> Result:
        return find()


def _as_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"))


def _merge_settings(overrides: Mapping[str, Any]) -> Settings:
    """Return the settings with these overrides. Settings of steps, data and runs are refused.

    Raises:
        UsageError, Problems: a setting is unknown, out of range, or has no effect here.
    """
    requested = RequestedSettings().layered_over(overrides, origin="pl.place(settings=)")
    problems: list[PacelineError] = [
        UsageError(
            f"pl.place does not use the setting {name!r}.", hint=f"one of {', '.join(_SUPPORTED_SETTINGS)}, or pl.Run"
        )
        for name in requested.values
        if name not in _SUPPORTED_SETTINGS and name.partition(".")[0] not in _SUPPORTED_SETTINGS
    ]
    raise_all(problems)
    return merge(requested)


def _make_mesh(layout: Layout, ranks: int) -> Mesh:
    problems: list[PacelineError] = []
    unsupported = {axis: reason for axis, reason in _UNSUPPORTED_AXES.items() if layout.sizes.get(axis, 1) != 1}
    unsupported |= {"threads": _UNSUPPORTED_AXES["pp"]} if layout.kind is LayoutKind.THREADS else {}
    for name, reason in unsupported.items():
        hint = f"with pl.Run(job, layout={str(layout)!r}) as run: ..."
        problems.append(LayoutError(f"pl.place has no {name}.", cause=reason, hint=hint))
    raise_all(problems)
    mesh = resolve_mesh(layout, ranks=ranks, problems=problems)
    problems += refuse_schedule(layout, mesh)
    raise_all(problems)
    return mesh
