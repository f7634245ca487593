"""`pl.place`: a model placed by any layout without pp, for loops that are no `Job`: GAN, RL, a trainer of one's own."""

import hashlib
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import LayoutError, PacelineError, UsageError, raise_all
from paceline.place.alike import equal_start
from paceline.place.compose import compose
from paceline.place.runs import Found
from paceline.place.start.hollow import tensor_bytes
from paceline.place.start.tensors import refuse_tensors
from paceline.place.units import trainable
from paceline.plan.legal import refuse_products
from paceline.plan.mesh import Mesh, mesh_of
from paceline.spec.layout import Kind, Layout, parse_layout
from paceline.spec.read import Asked, merge
from paceline.spec.settings import Settings
from paceline.streams import key
from paceline.survive.uncaught import watch_uncaught
from paceline.talk import say
from paceline.torch_private import guard_hooks
from paceline.train.begin import begin
from paceline.train.found_world import found_world
from paceline.train.placed_model import PlacedModel
from paceline.world import World
from paceline.worlds import Worlds

_HEARD = ("place", "init", "train.compile", "train.backend", "train.timeout_seconds")

_NEVER = {
    "pp": "there forward and backward of microbatches are the engine's to call, not the script's",
    "cp": "there the engine deals slices of each sequence, with labels and positions",
    "ep": "there the engine adds the experts' gradients over other ranks than the rest",
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
    """Build a model and place it; every rank calls this alike.

    Args:
        build: gives the model; all ranks begin with the weights that rank 0's has.
        layout: any without pp; not given, ddp.
        world: the ranks; not given, torch's default group where there is one, else what torchrun, srun or mpirun
            started, else this process alone.
        settings: `place.*`, `init.limit`, `train.compile`, `train.backend` and `train.timeout_seconds`.
        example: runs the model it is given on a small batch: what a tensor plan is derived from.
        device: `cpu`, `cuda`, or `auto`, where no world is given.

    Raises:
        LayoutError, UsageError, Problems: what can't be had so.
    """
    hook = watch_uncaught()
    try:
        placed = _place(build, layout=layout, world=world, settings=settings, example=example, device=device)
    except BaseException as error:
        if hook is not None:
            hook.remove_but_for(error)
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
    chosen = _settings(settings or {})
    here = world or found_world(device=device, settings=chosen)
    asked = parse_layout(layout or ("single" if here.world_size == 1 else "ddp"))
    mesh = _mesh(asked, here.world_size)
    worlds = Worlds.of(here, mesh=mesh)
    guard_hooks()
    state = torch.get_rng_state()
    drawn = hashlib.blake2b(bytes(state.numpy()), digest_size=8).hexdigest()
    seed = key(here.share_json(drawn), "place")
    begun = begin(partial(_build_sound, build), seed=seed, limit_bytes=chosen.init.limit, worlds=worlds)
    model = begun.on(here.device)
    if tensor_bytes(model) > chosen.init.limit:  # drawn by name: the next model is another all the same
        torch.set_rng_state(state)
        torch.rand(1)
    if begun.is_whole:
        equal_start(model, world=here)
    every = [replace(member, parameter=_without_memory(member.parameter)) for member in trainable(model)]
    placed = compose(
        model,
        asked=asked,
        worlds=worlds,
        example=None if example is None else _Example(model=model, given=example),
        say=say,
        how=chosen.place,
        compiles=chosen.train.compile,
        rows=begun.rows,
        late=begun.late,
    )
    return PlacedModel(model=model, placed=placed, worlds=worlds, asked=asked, every=every)


def _build_sound(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    if isinstance(model, nn.Module):  # anything else is refused by name later
        refuse_tensors(model)
    return model


@dataclass(frozen=True, kw_only=True)
class _Example:
    """The user's example as `compose` calls it."""

    model: nn.Module
    given: Callable[[nn.Module], Any]

    def __call__(self) -> Any:
        return self.given(self.model)

    def run(self, model: nn.Module) -> Any:
        return self.given(model)

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        return find()


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"))


def _settings(given: Mapping[str, Any]) -> Settings:
    """The settings, of which those of steps, data and runs are no part.

    Raises:
        UsageError, Problems: unknown, out of range, or not heard here.
    """
    asked = Asked().over(given, origin="pl.place(settings=)")
    problems: list[PacelineError] = [
        UsageError(f"pl.place does not hear the setting {name!r}.", hint=f"one of {', '.join(_HEARD)}, or pl.Run")
        for name in asked.values
        if name not in _HEARD and name.partition(".")[0] not in _HEARD
    ]
    raise_all(problems)
    return merge(asked)


def _mesh(asked: Layout, ranks: int) -> Mesh:
    problems: list[PacelineError] = []
    never = {axis: why for axis, why in _NEVER.items() if asked.sizes.get(axis, 1) != 1}
    never |= {"threads": _NEVER["pp"]} if asked.kind is Kind.THREADS else {}
    for what, why in never.items():
        hint = f"with pl.Run(job, layout={str(asked)!r}) as run: ..."
        problems.append(LayoutError(f"pl.place has no {what}.", cause=why, hint=hint))
    raise_all(problems)
    mesh = mesh_of(asked, ranks=ranks, problems=problems)
    problems += refuse_products(asked, mesh)
    raise_all(problems)
    return mesh
