"""The files of `pl.place`: full tensors in plain safetensors, written one at a time and read back as shards."""

import shutil
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.consolidate import consolidate_weights
from paceline.checkpoint.optimizer_state import (
    NESTED_PREFIX,
    NO_PARAMETER,
    OptimizerShards,
    optimizer_scalars,
    shared_state,
    split_state,
)
from paceline.checkpoint.state_dict_view import StateDictView, view_state_dict
from paceline.checkpoint.state_json import decode_state, drop_job_created
from paceline.checkpoint.state_outside_state_dict import state_dict_tensors
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.comm.process_group import World
from paceline.console.formatting import first_names
from paceline.errors import CheckpointError
from paceline.filesystem.atomic_files import read_json, sync_folder, write_json
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.parallel.initialization.safetensors_loading import SafetensorsFolder
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.module_access.sharded_tensors import LocalTensor, ShardedTensors
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.parallel.placement import ParallelizedModel

OPTIMIZER, OPTIONS = "optimizer", "options.json"


def save_folder(
    folder: Path, *, model: nn.Module, placed: ParallelizedModel, optimizers: Sequence[Optimizer], world: World
) -> None:
    """Save the model and optimizers; every rank calls this, and the first writes to a temporary folder and renames it.

    Raises:
        SaveError, CheckpointError: the folder can't be written; raised on every rank.
    """
    shares = OptimizerShards(parameters=placed.named_parameters, sharded=placed.optim_shards, world=world)
    aside = folder.with_name(f".{folder.name}.saving")
    weights = view_state_dict(model, weights=placed.weights, world=world)
    single = _single(optimizers, shares)
    held, scalars = run_on_all_ranks(world, lambda: _states(optimizers, shares, single))
    states = ShardedTensors(world=world, tensors=held)
    plain = [_plain(said) for said in optimizer_scalars(optimizers, shares, scalars)]
    listed = StateDictView(entries=states.local_tensors, weights=states)
    config = getattr(model, "config", None)
    run_on_all_ranks(world, lambda: consolidate_weights(weights, aside, config=config, world=world))
    run_on_all_ranks(world, lambda: consolidate_weights(listed, aside / OPTIMIZER, config=None, world=world))
    run_on_all_ranks(world, lambda: _end(aside, folder, plain) if world.is_main else None)


def _end(aside: Path, folder: Path, plain: Sequence[Any]) -> None:
    with convert_to_save_error("the placed model", folder):
        write_json(aside / OPTIMIZER / OPTIONS, list(plain))
        sync_folder(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)


def _single(optimizers: Sequence[Optimizer], shares: OptimizerShards) -> frozenset[str]:
    """Return the names of state tensors that are one number for a full parameter, such as Adam's `step`.

    If a rank holds one element of a parameter, its moments also have one element, so such a tensor is ambiguous.
    It is a number if another rank, with more elements or none, finds one, or if all tensors of its key are numbers.
    Every rank calls this.
    """
    seen = [
        (_stored_name(index, name, key), f"{index}/{key}", value, key != "step" and value.shape == parameter.shape)
        for index, optimizer in enumerate(optimizers)
        for parameter, name in _named(optimizer, shares)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]
    numbers = {name: key for name, key, value, may_be_cut in seen if value.numel() == 1 and not may_be_cut}
    others = sorted({key for _, key, value, _ in seen if value.numel() != 1})
    said = [(numbers, others)] if shares.sharded.is_unsharded else shares.world.gather_json((numbers, others))
    names = {name for found, _ in said for name in found}
    keys = {key for found, _ in said for key in found.values()} - {key for _, found in said for key in found}
    return frozenset(names | {name for name, key, _, _ in seen if key in keys})


def _stored_name(index: int, name: str, key: Any) -> str:
    return f"{index}/{name}/{key}"


def _states(
    optimizers: Sequence[Optimizer], shares: OptimizerShards, single: frozenset[str]
) -> tuple[list[LocalTensor], list[dict[str, Any]]]:
    """Return the tensors of every optimizer's state, and its other values as JSON by parameter name.

    A tensor is sharded like its parameter; if parameters are not sharded, it has any shape. Those in `scalar_names`
    are equal for all shards of a parameter, and become JSON.

    Raises:
        CheckpointError: a value can't be written, or its sharding is not known.
    """
    held: list[LocalTensor] = []
    scalars: list[dict[str, Any]] = []
    for index, optimizer in enumerate(optimizers):
        scalars.append({})
        kind = type(optimizer).__name__
        for parameter, name in _named(optimizer, shares):
            state = optimizer.state.get(parameter, {})
            alone = {id(value) for key, value in state.items() if _stored_name(index, name, key) in single}
            takes = partial(_is_stored, parameter.shape, alone)
            tensors, plain = split_state(state, name=name, kind=kind, accepts=takes)
            for key, value in tensors.items():
                part = _part_of(value, parameter, name=name, key=key, kind=kind, shares=shares)
                find = partial(Tensor.detach, value)
                held.append(
                    LocalTensor(
                        name=_stored_name(index, name, key), shard_spec=part, dtype=value.dtype, get_tensor=find
                    )
                )
            if plain:
                scalars[-1][name] = plain
        shared, inner = shared_state(optimizer, shares)
        for key, value in inner.items():
            find = partial(Tensor.detach, value)
            held.append(
                LocalTensor(
                    name=f"{index}//{key}", shard_spec=ShardSpec.full(value.shape), dtype=value.dtype, get_tensor=find
                )
            )
        if shared:
            scalars[-1][NO_PARAMETER] = shared
    return held, scalars


def _named(optimizer: Optimizer, shares: OptimizerShards) -> list[tuple[nn.Parameter, str]]:
    names = shares.parameter_names
    return [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]


def _is_stored(shape: torch.Size, alone: Container[int], value: Tensor) -> bool:
    return id(value) not in alone and (value.shape == shape or value.numel() != 1)


def _part_of(value: Tensor, parameter: Tensor, *, name: str, key: str, kind: str, shares: OptimizerShards) -> ShardSpec:
    if value.shape == parameter.shape:
        return shares.sharded.local_tensors[name].shard_spec
    if shares.sharded.is_unsharded:
        return ShardSpec.full(value.shape)
    raise CheckpointError(
        f"the state {key} of {kind} for {name} can't be saved: its shape differs from the part of {name} that this "
        "rank holds.",
        hint='layout="ddp"',
    )


def _plain(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups with the options that JSON can hold, and state values that are not tensors."""
    options = [{k: v for k, v in group["options"].items() if k != "param_names"} for group in optimizer["groups"]]
    return {"kind": optimizer["kind"], "groups": drop_job_created(options), "scalars": optimizer["scalars"]}


def _listed(model: nn.Module) -> dict[str, str]:
    """Return each name of the `state_dict`, mapped to the first name of the same tensor."""
    firsts = {id(t): n for n, t in [*model.named_buffers(), *model.named_parameters()]}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    known = {name: firsts[id(tensor)] for name, tensor in every}
    return {name: known[name] for name in state_dict_tensors(model) if name in known}


def load_folder(folder: Path, *, placed: ParallelizedModel, optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Load this rank's shards of the weights and of the optimizers' state.

    Raises:
        CheckpointError: the folder belongs to another model or other optimizers, or can't be read.
    """
    _load_weights(SafetensorsFolder(folder), placed, listed=_listed(model), folder=folder)
    try:
        plains = read_json(folder / OPTIMIZER / OPTIONS)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / OPTIMIZER / OPTIONS} can't be read: {error}.", hint="what placed.save wrote"
        ) from error
    saved, now = [plain["kind"] for plain in plains], [type(optimizer).__name__ for optimizer in optimizers]
    if saved != now:
        raise CheckpointError(
            f"{folder} has the optimizers {saved}, but this model has {now}.",
            hint="build the same optimizers before load",
        )
    shelf = SafetensorsFolder(folder / OPTIMIZER)
    names = {id(m.parameter): m.name for m in placed.named_parameters}
    for index, (optimizer, plain) in enumerate(zip(optimizers, plains, strict=True)):
        _load_optimizer(optimizer, plain, shelf, names, placed.optim_shards, prefix=f"{index}/")


def _load_weights(shelf: SafetensorsFolder, placed: ParallelizedModel, *, listed: dict[str, str], folder: Path) -> None:
    wanted = {
        first: placed.weights.local_tensors[first] for first in listed.values() if first in placed.weights.local_tensors
    }
    there = set(shelf.names)
    differing = sorted(
        {n for n in wanted if n not in there or shelf.shape(n) != wanted[n].shard_spec.shape} | (there - set(listed))
    )
    if differing:
        raise CheckpointError(
            f"{folder} belongs to a different model: {first_names(differing)} differ.", where=str(folder)
        )
    with torch.no_grad():
        for name, held in wanted.items():
            if held.tensor is not None and held.shard_spec.numel:
                copy_into(held.tensor, shelf.read_shard(name, held.shard_spec))


def _load_optimizer(
    optimizer: Optimizer,
    plain: Any,
    shelf: SafetensorsFolder,
    names: dict[int, str],
    kept: ShardedTensors,
    *,
    prefix: str,
) -> None:
    keys: dict[str, list[str]] = {}
    for key in shelf.names:
        if key.startswith(prefix):
            keys.setdefault(key.removeprefix(prefix).rpartition("/")[0], []).append(key)
    for group, options in zip(optimizer.param_groups, plain["groups"], strict=True):
        found = decode_state(options)
        group.update({key: value for key, value in found.items() if value is not None or group.get(key) is None})
        for parameter in group["params"]:
            name = names[id(parameter)]
            read = partial(_state, shelf, kept.local_tensors[name].shard_spec, parameter, f"{prefix}{name}/")
            state = decode_state(plain["scalars"].get(name, {}), fetch=read)
            leaves = [key.rpartition("/")[2] for key in keys.get(name, [])]
            state |= {leaf: read(leaf) for leaf in leaves if not leaf.startswith(NESTED_PREFIX)}
            if state:
                optimizer.state[parameter] = state
    for key, value in plain["scalars"].get(NO_PARAMETER, []):
        optimizer.state[decode_state(key)] = decode_state(
            value, fetch=lambda inner: shelf.read_tensor(f"{prefix}/{inner}")
        )


def _state(shelf: SafetensorsFolder, part: ShardSpec, parameter: Tensor, prefix: str, leaf: str) -> Tensor:
    key = f"{prefix}{leaf}"
    if shelf.shape(key) != part.shape:
        return shelf.read_tensor(key).to(parameter.device)
    if part.local_shape is None:
        return torch.empty_like(parameter)
    return shelf.read_shard(key, part).to(parameter.device)
