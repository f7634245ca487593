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
    exchange_optimizer_entries,
    shared_state,
    split_state,
)
from paceline.checkpoint.state_dict_view import StateDictView, view_state_dict
from paceline.checkpoint.state_json import decode_state, remove_unwritable_values
from paceline.checkpoint.state_outside_state_dict import state_dict_tensors
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.comm.exchange import run_exchange
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
    folder: Path, *, model: nn.Module, parallelized: ParallelizedModel, optimizers: Sequence[Optimizer], world: World
) -> None:
    """Save the model and optimizers. Every rank calls this. Rank 0 writes a temporary folder and renames it at the end.

    Raises:
        SaveError, CheckpointError: the folder can't be written; raised on every rank.
    """
    optimizer_shards = OptimizerShards(
        parameters=parallelized.named_parameters, sharded=parallelized.optim_shards, world=world
    )
    temporary = folder.with_name(f".{folder.name}.saving")
    weights = view_state_dict(model, weights=parallelized.weights, world=world)
    scalar_names = _scalar_state_names(optimizers, optimizer_shards)
    tensors, scalars = run_on_all_ranks(world, lambda: _collect_states(optimizers, optimizer_shards, scalar_names))
    states = ShardedTensors(world=world, tensors=tensors)
    options = [
        _optimizer_options(saved_optimizer)
        for saved_optimizer in run_exchange(world, exchange_optimizer_entries(optimizers, optimizer_shards, scalars))
    ]
    state_view = StateDictView(entries=states.local_tensors, weights=states)
    config = getattr(model, "config", None)
    run_on_all_ranks(world, lambda: consolidate_weights(weights, temporary, config=config, world=world))
    run_on_all_ranks(world, lambda: consolidate_weights(state_view, temporary / OPTIMIZER, config=None, world=world))
    run_on_all_ranks(world, lambda: _commit_folder(temporary, folder, options) if world.is_main else None)


def _commit_folder(temporary: Path, folder: Path, options: Sequence[Any]) -> None:
    """Write the optimizers' options, flush the temporary folder to disk, and rename it to `folder`."""
    with convert_to_save_error("the placed model", folder):
        write_json(temporary / OPTIMIZER / OPTIONS, list(options))
        sync_folder(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)


def _scalar_state_names(optimizers: Sequence[Optimizer], optimizer_shards: OptimizerShards) -> frozenset[str]:
    """Return the names of state tensors that are one number per full parameter, such as Adam's `step`.

    If a rank holds one element of a parameter, its shards of Adam's moments have one element too, and look like such
    numbers. Therefore, a tensor with one element is a number only in these cases:

    - Its key is `step`.
    - On some rank, its shape differs from the shape of that rank's part of the parameter.
    - Another tensor with the same key is a number by these rules, and every tensor with this key has one element.

    Every rank calls this.
    """
    states = [
        (_stored_name(index, name, key), f"{index}/{key}", value, key != "step" and value.shape == parameter.shape)
        for index, optimizer in enumerate(optimizers)
        for parameter, name in _parameters_with_names(optimizer, optimizer_shards)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]
    scalars = {name: key for name, key, value, may_be_sharded in states if value.numel() == 1 and not may_be_sharded}
    tensor_keys = sorted({key for _, key, value, _ in states if value.numel() != 1})
    by_rank = (
        [(scalars, tensor_keys)]
        if optimizer_shards.sharded.is_unsharded
        else optimizer_shards.world.gather_json((scalars, tensor_keys))
    )
    names = {name for rank_scalars, _ in by_rank for name in rank_scalars}
    keys = {key for rank_scalars, _ in by_rank for key in rank_scalars.values()} - {
        key for _, rank_tensor_keys in by_rank for key in rank_tensor_keys
    }
    return frozenset(names | {name for name, key, _, _ in states if key in keys})


def _stored_name(index: int, name: str, key: Any) -> str:
    """Return the name in the file for a state tensor: the optimizer's index, the parameter's name, the state's key."""
    return f"{index}/{name}/{key}"


def _collect_states(
    optimizers: Sequence[Optimizer], optimizer_shards: OptimizerShards, scalar_names: frozenset[str]
) -> tuple[list[LocalTensor], list[dict[str, Any]]]:
    """Return the tensors of all optimizers' states, and for each optimizer the other values as JSON by parameter name.

    A tensor is sharded like its parameter. If parameters are not sharded, it may have any shape. The tensors in
    `scalar_names` are equal for all shards of a parameter, and become JSON.

    Raises:
        CheckpointError: a value can't be written, or its sharding is not known.
    """
    local_tensors: list[LocalTensor] = []
    scalars: list[dict[str, Any]] = []
    for index, optimizer in enumerate(optimizers):
        scalars.append({})
        kind = type(optimizer).__name__
        for parameter, name in _parameters_with_names(optimizer, optimizer_shards):
            state = optimizer.state.get(parameter, {})
            scalar_ids = {id(value) for key, value in state.items() if _stored_name(index, name, key) in scalar_names}
            is_stored = partial(_is_stored, parameter.shape, scalar_ids)
            tensors, values = split_state(state, name=name, kind=kind, accepts=is_stored)
            for key, value in tensors.items():
                shard_spec = _shard_of_state(
                    value, parameter, name=name, key=key, kind=kind, optimizer_shards=optimizer_shards
                )
                get_tensor = partial(Tensor.detach, value)
                local_tensors.append(
                    LocalTensor(
                        name=_stored_name(index, name, key),
                        shard_spec=shard_spec,
                        dtype=value.dtype,
                        get_tensor=get_tensor,
                    )
                )
            if values:
                scalars[-1][name] = values
        shared_scalars, shared_tensors = shared_state(optimizer, optimizer_shards)
        for key, value in shared_tensors.items():
            get_tensor = partial(Tensor.detach, value)
            local_tensors.append(
                LocalTensor(
                    name=f"{index}//{key}",
                    shard_spec=ShardSpec.full(value.shape),
                    dtype=value.dtype,
                    get_tensor=get_tensor,
                )
            )
        if shared_scalars:
            scalars[-1][NO_PARAMETER] = shared_scalars
    return local_tensors, scalars


def _parameters_with_names(optimizer: Optimizer, optimizer_shards: OptimizerShards) -> list[tuple[nn.Parameter, str]]:
    names = optimizer_shards.parameter_names
    return [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]


def _is_stored(shape: torch.Size, scalar_ids: Container[int], value: Tensor) -> bool:
    """Return True if a state tensor is written as a tensor, False if as JSON. `shape` is the parameter's shape."""
    return id(value) not in scalar_ids and (value.shape == shape or value.numel() != 1)


def _shard_of_state(
    value: Tensor, parameter: Tensor, *, name: str, key: str, kind: str, optimizer_shards: OptimizerShards
) -> ShardSpec:
    """Return how a state tensor is sharded: like its parameter, or not at all if parameters are not sharded."""
    if value.shape == parameter.shape:
        return optimizer_shards.sharded.local_tensors[name].shard_spec
    if optimizer_shards.sharded.is_unsharded:
        return ShardSpec.full(value.shape)
    raise CheckpointError(
        f"the state {key} of {kind} for {name} can't be saved: its shape differs from the part of {name} that this "
        "rank holds.",
        hint='layout="ddp"',
    )


def _optimizer_options(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's type, its groups' options as far as JSON can hold them, and its state without tensors."""
    options = [{k: v for k, v in group["options"].items() if k != "param_names"} for group in optimizer["groups"]]
    return {"kind": optimizer["kind"], "groups": remove_unwritable_values(options), "scalars": optimizer["scalars"]}


def _state_dict_names(model: nn.Module) -> dict[str, str]:
    """Return each name in the `state_dict`, mapped to the first of the names that its tensor has in the model."""
    name_by_id = {id(t): n for n, t in [*model.named_buffers(), *model.named_parameters()]}
    named_tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first_name_of = {name: name_by_id[id(tensor)] for name, tensor in named_tensors}
    return {name: first_name_of[name] for name in state_dict_tensors(model) if name in first_name_of}


def load_folder(
    folder: Path, *, parallelized: ParallelizedModel, optimizers: Sequence[Optimizer], model: nn.Module
) -> None:
    """Load this rank's shards of the weights and of the optimizers' state.

    Raises:
        CheckpointError: the folder belongs to another model or other optimizers, or can't be read.
    """
    _load_weights(SafetensorsFolder(folder), parallelized, first_name_of=_state_dict_names(model), folder=folder)
    try:
        saved_optimizers = read_json(folder / OPTIMIZER / OPTIONS)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / OPTIMIZER / OPTIONS} can't be read: {error}.", hint="give the folder that placed.save wrote"
        ) from error
    saved_types, current_types = (
        [saved["kind"] for saved in saved_optimizers],
        [type(optimizer).__name__ for optimizer in optimizers],
    )
    if saved_types != current_types:
        raise CheckpointError(
            f"{folder} has the optimizers {saved_types}, but this model has {current_types}.",
            hint="build the same optimizers before load",
        )
    stored = SafetensorsFolder(folder / OPTIMIZER)
    names = {id(m.parameter): m.name for m in parallelized.named_parameters}
    for index, (optimizer, saved) in enumerate(zip(optimizers, saved_optimizers, strict=True)):
        _load_optimizer(optimizer, saved, stored, names, parallelized.optim_shards, prefix=f"{index}/")


def _load_weights(
    stored: SafetensorsFolder, parallelized: ParallelizedModel, *, first_name_of: dict[str, str], folder: Path
) -> None:
    """Load this rank's shards of the weights. `first_name_of` is the result of `_state_dict_names`."""
    local_tensors = {
        first: parallelized.weights.local_tensors[first]
        for first in first_name_of.values()
        if first in parallelized.weights.local_tensors
    }
    stored_names = set(stored.names)
    differing = sorted(
        {n for n in local_tensors if n not in stored_names or stored.shape(n) != local_tensors[n].shard_spec.shape}
        | (stored_names - set(first_name_of))
    )
    if differing:
        raise CheckpointError(
            f"{folder} belongs to a different model: {first_names(differing)} differ.", where=str(folder)
        )
    with torch.no_grad():
        for name, local_tensor in local_tensors.items():
            if local_tensor.tensor is not None and local_tensor.shard_spec.numel:
                copy_into(local_tensor.tensor, stored.read_shard(name, local_tensor.shard_spec))


def _load_optimizer(
    optimizer: Optimizer,
    saved: Any,
    stored: SafetensorsFolder,
    names: dict[int, str],
    shards: ShardedTensors,
    *,
    prefix: str,
) -> None:
    """Load the options and the state of one optimizer. Names of its stored tensors start with `prefix`.

    `names` has the names of this rank's parameters, by the id of the parameter.
    """
    keys_by_parameter: dict[str, list[str]] = {}
    for key in stored.names:
        if key.startswith(prefix):
            keys_by_parameter.setdefault(key.removeprefix(prefix).rpartition("/")[0], []).append(key)
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        saved_options = decode_state(options)
        group.update(
            {key: value for key, value in saved_options.items() if value is not None or group.get(key) is None}
        )
        for parameter in group["params"]:
            name = names[id(parameter)]
            read = partial(_read_state, stored, shards.local_tensors[name].shard_spec, parameter, f"{prefix}{name}/")
            state = decode_state(saved["scalars"].get(name, {}), fetch=read)
            state_names = [key.rpartition("/")[2] for key in keys_by_parameter.get(name, [])]
            state |= {
                state_name: read(state_name) for state_name in state_names if not state_name.startswith(NESTED_PREFIX)
            }
            if state:
                optimizer.state[parameter] = state
    for key, value in saved["scalars"].get(NO_PARAMETER, []):
        optimizer.state[decode_state(key)] = decode_state(
            value, fetch=lambda tensor_key: stored.read_tensor(f"{prefix}/{tensor_key}")
        )


def _read_state(
    stored: SafetensorsFolder, shard_spec: ShardSpec, parameter: Tensor, prefix: str, state_name: str
) -> Tensor:
    """Return a stored state tensor: this rank's shard of it, or the whole tensor if it is not sharded."""
    key = f"{prefix}{state_name}"
    if stored.shape(key) != shard_spec.shape:
        return stored.read_tensor(key).to(parameter.device)
    if shard_spec.local_shape is None:
        return torch.empty_like(parameter)
    return stored.read_shard(key, shard_spec).to(parameter.device)
