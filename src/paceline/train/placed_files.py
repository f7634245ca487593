"""What `pl.place` saves: whole tensors in plain safetensors, written one after another, read back in parts."""

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.place.compose import Placed
from paceline.place.holding import Held, Holding
from paceline.place.parts import Part
from paceline.place.start.files import Shelf
from paceline.place.views import write
from paceline.store.disk import read_json, sync_folder, write_json
from paceline.store.full import written
from paceline.train.apart import tensors_of
from paceline.train.consolidated import consolidate
from paceline.train.convert import first_names
from paceline.train.listing import Listing, list_model
from paceline.train.plain import from_plain, to_plain
from paceline.train.together import together
from paceline.world import World

OPTIMIZER, OPTIONS = "optimizer", "options.json"


def save_folder(
    folder: Path, *, model: nn.Module, placed: Placed, optimizers: Sequence[Optimizer], world: World
) -> None:
    """Every rank calls this; the first writes aside and renames.

    Raises:
        SaveError, CheckpointError: it can't be written; on every rank alike.
    """
    names = {id(m.parameter): m.name for m in placed.named}
    aside = folder.with_name(f".{folder.name}.saving")
    weights = list_model(model, weights=placed.weights, world=world)
    held = together(world, lambda: list(_states(optimizers, names, placed)))
    states = Holding(world=world, held=held)
    listed = Listing(entries=states.mine, weights=states)
    config = getattr(model, "config", None)
    together(world, lambda: consolidate(weights, aside, config=config, world=world))
    together(world, lambda: consolidate(listed, aside / OPTIMIZER, config=None, world=world))
    plain = together(world, lambda: [_plain(optimizer, names) for optimizer in optimizers])
    together(world, lambda: _end(aside, folder, plain) if world.is_main else None)


def _end(aside: Path, folder: Path, plain: Sequence[Any]) -> None:
    with written("the placed model", folder):
        write_json(aside / OPTIMIZER / OPTIONS, list(plain))
        sync_folder(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)


def _states(optimizers: Sequence[Optimizer], names: dict[int, str], placed: Placed) -> Iterator[Held]:
    """State that is cut as its parameter is, and where parameters are whole any other that is large."""
    for index, optimizer in enumerate(optimizers):
        for parameter, key, value in _of(optimizer):
            if not _is_tensor(key, value):
                continue
            name = names[id(parameter)]
            if value.shape == parameter.shape:
                part = placed.kept.mine[name].part
            elif placed.kept.is_whole:
                part = Part.all_of(value.shape)
            else:
                raise CheckpointError(
                    f"the state {key} of {type(optimizer).__name__} for {name} can't be saved: it has another shape "
                    f"than the part of {name} that this rank holds.",
                    hint='layout="ddp"',
                )
            yield Held(name=f"{index}/{name}/{key}", part=part, dtype=value.dtype, find=partial(Tensor.detach, value))


def _of(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, str, Any]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                yield parameter, key, value


def _is_tensor(key: str, value: Any) -> bool:
    """A count of steps is none: it is the same for all of a parameter's parts."""
    return isinstance(value, Tensor) and key != "step"


def _plain(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Groups with their options, and state that is no tensor."""
    kind = type(optimizer).__name__
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, key, value in _of(optimizer):
        if not _is_tensor(key, value):
            scalars.setdefault(names[id(parameter)], {})[key] = to_plain(value, where=kind)
    groups = [
        to_plain({key: value for key, value in group.items() if key not in ("params", "param_names")}, where=kind)
        for group in optimizer.param_groups
    ]
    return {"kind": kind, "groups": groups, "scalars": scalars}


def _listed(model: nn.Module) -> dict[str, str]:
    """Each name of the `state_dict`, and the first name of the same tensor."""
    firsts = {id(t): n for n, t in [*model.named_buffers(), *model.named_parameters()]}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    known = {name: firsts[id(tensor)] for name, tensor in every}
    return {name: known[name] for name in tensors_of(model) if name in known}


def load_folder(folder: Path, *, placed: Placed, optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """This rank's parts of the weights, and of the optimizers' state.

    Raises:
        CheckpointError: it is another model's, has other optimizers, or can't be read.
    """
    _load_weights(Shelf(folder), placed, listed=_listed(model), folder=folder)
    try:
        plains = read_json(folder / OPTIMIZER / OPTIONS)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / OPTIMIZER / OPTIONS} can't be read: {error}.", hint="what placed.save wrote"
        ) from error
    saved, now = [plain["kind"] for plain in plains], [type(optimizer).__name__ for optimizer in optimizers]
    if saved != now:
        raise CheckpointError(
            f"{folder} has the optimizers {saved}, here are {now}.", hint="make the same optimizers before load"
        )
    shelf = Shelf(folder / OPTIMIZER)
    names = {id(m.parameter): m.name for m in placed.named}
    for index, (optimizer, plain) in enumerate(zip(optimizers, plains, strict=True)):
        _load_optimizer(optimizer, plain, shelf, names, placed.kept, prefix=f"{index}/")


def _load_weights(shelf: Shelf, placed: Placed, *, listed: dict[str, str], folder: Path) -> None:
    wanted = {first: placed.weights.mine[first] for first in listed.values() if first in placed.weights.mine}
    there = set(shelf.names)
    differing = sorted(
        {n for n in wanted if n not in there or shelf.shape(n) != wanted[n].part.shape} | (there - set(listed))
    )
    if differing:
        raise CheckpointError(f"{folder} is another model's: {first_names(differing)} differ.", where=str(folder))
    with torch.no_grad():
        for name, held in wanted.items():
            if held.tensor is not None and held.part.numel:
                write(held.tensor, shelf.part(name, held.part))


def _load_optimizer(
    optimizer: Optimizer, plain: Any, shelf: Shelf, names: dict[int, str], kept: Holding, *, prefix: str
) -> None:
    keys: dict[str, list[str]] = {}
    for key in shelf.names:
        if key.startswith(prefix):
            keys.setdefault(key.removeprefix(prefix).rpartition("/")[0], []).append(key)
    for group, options in zip(optimizer.param_groups, plain["groups"], strict=True):
        found = from_plain(options)
        group.update({key: value for key, value in found.items() if value is not None or group.get(key) is None})
        for parameter in group["params"]:
            name = names[id(parameter)]
            state = {k: from_plain(v) for k, v in plain["scalars"].get(name, {}).items()}
            for key in keys.get(name, []):
                state[key.rpartition("/")[2]] = _state(shelf, key, kept.mine[name].part, parameter)
            if state:
                optimizer.state[parameter] = state


def _state(shelf: Shelf, key: str, part: Part, parameter: Tensor) -> Tensor:
    if shelf.shape(key) != part.shape:
        return shelf.whole(key).to(parameter.device)
    if part.local is None:
        return torch.empty_like(parameter)
    return shelf.part(key, part).to(parameter.device)
