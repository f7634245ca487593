"""Training state between two steps: collect it for a checkpoint, and load it from one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint
from paceline.checkpoint.files.manifest import rank_file
from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.lr_schedule_state import advance_schedule, changed_schedules, load_schedule, scheduled_options
from paceline.checkpoint.optimizer_options import changed_keys, job_controlled_options
from paceline.checkpoint.optimizer_state import (
    OptimizerShards,
    exchange_optimizer_entries,
    load_group_options,
    load_optimizer_state,
    local_state,
)
from paceline.checkpoint.shard_ownership import owned_shards, read_shard, writer_rank
from paceline.checkpoint.state_dict_view import StateDictView, exchange_view, view_state_dict
from paceline.checkpoint.state_json import decode_state, encode_state, remove_unwritable_values
from paceline.checkpoint.state_outside_state_dict import (
    NonPersistentBuffers,
    get_extra_state,
    load_extra_state,
    state_dict_tensors,
)
from paceline.checkpoint.tensor_bytes import DTYPES, deduplicate_storages, describe_tensor
from paceline.comm.collective_errors import first_value_per_key, run_on_all_ranks
from paceline.comm.exchange import Exchange, run_exchanges
from paceline.comm.process_group import World
from paceline.console.formatting import first_names
from paceline.errors import CheckpointError, JobError
from paceline.job import Job
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.parallel.module_access.tensor_access import copy_into, local_elements
from paceline.step.optimizer_update import Ema, OptimizerUpdate

MODEL, OPTIMIZER, EMA = "model.safetensors", "optimizer.safetensors", "ema.safetensors"
BUFFERS = "buffers.safetensors"


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The objects that a checkpoint saves: the model, its optimizer update, and the shards that every rank holds."""

    model: nn.Module
    update: OptimizerUpdate
    non_persistent_buffers: NonPersistentBuffers
    weights: ShardedTensors
    optimizer_shards: OptimizerShards

    @property
    def world(self) -> World:
        """The world of the ranks that share these weights."""
        return self.optimizer_shards.world


def create_optimizers(job: Job, model: nn.Module) -> list[Optimizer]:
    """Call the job's factory and check that every trainable parameter is in exactly one group.

    Raises:
        JobError: a parameter is missing, in two groups, or not the model's.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise JobError("the model has no trainable parameter.", hint="parameter.requires_grad_(True)")
    created = job.optimizer(named)
    optimizers = list(created) if isinstance(created, list | tuple) else [created]
    check_optimizers(optimizers, {id(p): name for name, p in named})
    return optimizers


def check_optimizers(optimizers: Sequence[Any], names: Mapping[int, str]) -> None:
    """Check that `optimizer=` returned optimizers, and that each of these parameters is in exactly one group.

    Raises:
        JobError: a parameter is missing, in two groups, or not the model's.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(
                f"optimizer= returned a {type(optimizer).__name__}, expected a torch.optim.Optimizer.",
                hint="optimizer=lambda named: torch.optim.AdamW([p for _, p in named])",
            )
    _check_groups(optimizers, names)


def collect_files(train_state: TrainState) -> tuple[dict[str, list[Writable]], dict[str, Any]]:
    """Return the tensors that this rank writes, by file, and the JSON state that all ranks share.

    Every rank calls this.

    Raises:
        CheckpointError: some state can't be saved, on this rank or another.
    """
    weights, shards, world = train_state.weights, train_state.optimizer_shards, train_state.world
    view, buffers, (states, optimizer_entries), extra_state = run_exchanges(
        world,
        [
            exchange_view(train_state.model, weights=weights),
            train_state.non_persistent_buffers.exchange_changed(weights, rank=world.rank),
            _exchange_optimizers(train_state),
            _exchange_extra_state(train_state),
        ],
    )
    tensors, aliases = _model_tensors(train_state, view)
    files = _named_files(weights, world.rank, {MODEL: tensors, BUFFERS: buffers, EMA: _ema_tensors(train_state)})
    files |= _named_files(shards.sharded, world.rank, {OPTIMIZER: states})
    scaler = train_state.update.scaler
    schedules = [encode_state(s.state_dict(), where=type(s).__name__) for s in train_state.update.lr_schedulers]
    return files, {
        "aliases": aliases,
        "optimizers": optimizer_entries,
        "schedules": [remove_unwritable_values(s) for s in schedules],
        "scaler": None if scaler is None else encode_state(scaler.state_dict(), where="the loss scaler"),
        "extra_state": extra_state,
    }


def load_model(checkpoint: OpenCheckpoint, train_state: TrainState) -> None:
    """Copy a checkpoint's weights and buffers into the model, in place, so that ties and aliases remain.

    Every rank calls this. For a sharded tensor, a rank reads only the stored shards that overlap its own shard.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or its bytes do not match their digests.
    """
    stored = checkpoint.files.get(MODEL, StoredTensors([]))
    aliases: Mapping[str, str] = checkpoint.state.get("aliases", {})
    view = view_state_dict(train_state.model, weights=train_state.weights, world=train_state.world)
    run_on_all_ranks(train_state.world, lambda: _check_model(checkpoint, stored, aliases, view))
    run_on_all_ranks(train_state.world, lambda: _load_tensors(checkpoint, stored, aliases, view, train_state))
    load_extra_state(train_state.model, checkpoint.state.get("extra_state", {}))


def _check_model(
    checkpoint: OpenCheckpoint, stored: StoredTensors, aliases: Mapping[str, str], view: StateDictView
) -> None:
    expected = view.structure
    actual = {name: describe_tensor(DTYPES[stored.dtype(name)], stored.shape(name)) for name in stored}
    for name in expected:
        actual.pop(name, None)
        source = aliases.get(name, name)
        if source in stored:
            actual[name] = describe_tensor(DTYPES[stored.dtype(source)], stored.shape(source))
    differing = sorted(name for name in {*expected, *actual} if expected.get(name) != actual.get(name))
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{checkpoint.path.name} belongs to a different model: {first_names(differing)} differ.",
            where=str(checkpoint.path),
            cause=f"{name} is {actual.get(name) or 'absent'} in the checkpoint and "
            f"{expected.get(name) or 'absent'} in the model",
            hint="the same --job.* settings as when it was saved",
        )


def _load_tensors(
    checkpoint: OpenCheckpoint,
    stored: StoredTensors,
    aliases: Mapping[str, str],
    view: StateDictView,
    train_state: TrainState,
) -> None:
    loaded_pairs: set[tuple[str, str]] = set()
    for name, local in view.entries.items():
        stored_and_local = (aliases.get(name, name), local.name)
        target = local.tensor
        if target is not None and stored_and_local not in loaded_pairs:
            with torch.no_grad():
                copy_into(target, read_shard(stored, stored_and_local[0], shard=local.shard_spec))
            loaded_pairs.add(stored_and_local)
    train_state.non_persistent_buffers.restore(checkpoint.files.get(BUFFERS, StoredTensors([])), train_state.weights)


def load_update(
    checkpoint: OpenCheckpoint,
    train_state: TrainState,
    *,
    saved_identity: Mapping[str, Any],
    current_identity: Mapping[str, Any],
) -> None:
    """Load the state of optimizers, schedules, loss scaler and EMA. Every rank calls this.

    The identities describe the optimizers and schedules of the checkpoint and of this job. Options that the job has
    changed keep their current values.
    """
    run_on_all_ranks(train_state.world, lambda: _load_update(checkpoint, train_state, saved_identity, current_identity))


def _load_update(
    checkpoint: OpenCheckpoint,
    train_state: TrainState,
    saved_identity: Mapping[str, Any],
    current_identity: Mapping[str, Any],
) -> None:
    state, update = checkpoint.state, train_state.update
    if len(state["optimizers"]) != len(update.optimizers):
        raise CheckpointError(
            f"the checkpoint has {len(state['optimizers'])} optimizers, but the job builds {len(update.optimizers)}.",
            where=str(checkpoint.path),
            cause="the job's optimizer= has changed since",
            hint="the job as it was, or a new run with another --run-dir",
        )
    for index, (optimizer, saved) in enumerate(zip(update.optimizers, state["optimizers"], strict=True)):
        changes = _OptimizerChanges.from_identities(index, saved_identity, current_identity)
        for schedule in update.lr_schedulers[index : index + 1]:
            if changes.replays_schedule:
                advance_schedule(schedule, steps=checkpoint.step)
            else:
                load_schedule(schedule, state["schedules"][index])
        if saved["kind"] == type(optimizer).__name__:
            if len(saved["groups"]) == len(optimizer.param_groups):  # otherwise, the user has accepted new groups
                excluded = [
                    changes.job_controlled(group_index, group)
                    for group_index, group in enumerate(optimizer.param_groups)
                ]
                load_group_options(optimizer, saved["groups"], excluded=excluded)
            stored = checkpoint.files.get(OPTIMIZER, StoredTensors([]))
            load_optimizer_state(optimizer, saved, stored, shards=train_state.optimizer_shards, prefix=f"{index}/")
    if update.scaler is not None and state.get("scaler"):
        update.scaler.load_state_dict(decode_state(state["scaler"]))
    if update.ema is not None:
        load_ema(checkpoint, update.ema, weights=train_state.weights)


@dataclass(frozen=True, kw_only=True)
class _OptimizerChanges:
    """The changes to one optimizer and its schedule since the run began: saved and current options by group."""

    saved_options: Sequence[Mapping[str, Any]]
    current_options: Sequence[Mapping[str, Any]]
    has_new_schedule: bool

    @classmethod
    def from_identities(
        cls, index: int, saved_identity: Mapping[str, Any], current_identity: Mapping[str, Any]
    ) -> "_OptimizerChanges":
        current_options = current_identity["optimizer"][index]["options"]
        saved_optimizers = saved_identity["optimizer"]
        saved_options = (
            saved_optimizers[index].get("options", current_options)
            if index < len(saved_optimizers)
            else current_options
        )
        schedules = saved_identity["schedule"][index : index + 1], current_identity["schedule"][index : index + 1]
        is_new = len(schedules[0]) != len(schedules[1]) or any(changed_schedules(*schedules))
        return cls(
            saved_options=saved_options if len(saved_options) == len(current_options) else current_options,
            current_options=current_options,
            has_new_schedule=is_new,
        )

    @property
    def replays_schedule(self) -> bool:
        """Return True if the schedule or an option has changed: the schedule is then advanced from its start."""
        options = zip(self.saved_options, self.current_options, strict=True)
        return self.has_new_schedule or any(changed_keys(saved, current) for saved, current in options)

    def job_controlled(self, group_index: int, group: Mapping[str, Any]) -> set[str]:
        """Return the options of a group that keep their current values."""
        if not self.replays_schedule:
            return set()
        scheduled = scheduled_options(group) if self.has_new_schedule else set()
        return (
            job_controlled_options(
                group, saved=self.saved_options[group_index], current=self.current_options[group_index]
            )
            | scheduled
        )


def load_ema(checkpoint: OpenCheckpoint, ema: Ema, *, weights: ShardedTensors) -> None:
    """Load the EMA after the weights. An average that the checkpoint lacks starts at the weights."""
    stored = checkpoint.files.get(EMA, StoredTensors([]))
    with torch.no_grad():
        for name, average, weight in zip(ema.names, ema.averages, ema.weights, strict=True):
            shard = weights.local_tensors[name].shard_spec
            if name not in stored:
                average.copy_(weight)
            elif shard.local_shape is not None:
                local_elements(average).copy_(read_shard(stored, name, shard=shard))


def grid_state(grid: FixedPointGrid | None) -> dict[str, int | None]:
    """Return the exponents of exact mode's fixed-point grid, by parameter name; empty without exact mode."""
    return {} if grid is None else dict(zip(grid.names, grid.exponents, strict=True))


def load_grid(grid: FixedPointGrid | None, state: Mapping[str, int | None]) -> None:
    """Load the exponents that `grid_state` returned."""
    if grid is not None:
        grid.exponents = [state.get(name) for name in grid.names]


def _model_tensors(train_state: TrainState, view: StateDictView) -> tuple[list[Writable], dict[str, str]]:
    """Return weights and persistent buffers, and the aliases: the other names of tied tensors."""
    weights, rank = train_state.weights, train_state.world.rank
    if weights.is_unsharded:
        return deduplicate_storages(state_dict_tensors(train_state.model))
    aliases = {name: local.name for name, local in view.entries.items() if name != local.name}
    writable: list[Writable] = []
    for name in dict.fromkeys(local.name for local in view.entries.values()):
        local = weights.local_tensors[name]
        writable += owned_shards(
            name, dtype=local.dtype, get_tensor=local.get_tensor, shard_specs=weights.shard_specs(name), rank=rank
        )
    return writable, aliases


def _ema_tensors(train_state: TrainState) -> list[Writable]:
    ema, rank = train_state.update.ema, train_state.world.rank
    writable: list[Writable] = []
    for name, tensor in zip(ema.names, ema.averages, strict=True) if ema is not None else ():
        shard_specs = train_state.weights.shard_specs(name)
        writable += owned_shards(
            name, dtype=tensor.dtype, get_tensor=partial(local_elements, tensor), shard_specs=shard_specs, rank=rank
        )
    return writable


def _named_files(
    sharded: ShardedTensors, rank: int, tensors_by_kind: Mapping[str, list[Writable]]
) -> dict[str, list[Writable]]:
    """Return this rank's tensors by file. If no tensor is sharded, rank 0 writes all of them."""
    if sharded.is_unsharded:
        always_written = (MODEL, OPTIMIZER)
        return {
            kind: tensors
            for kind, tensors in tensors_by_kind.items()
            if rank == 0 and (tensors or kind in always_written)
        }
    return {rank_file(kind, rank): tensors for kind, tensors in tensors_by_kind.items() if tensors}


def _exchange_optimizers(train_state: TrainState) -> Exchange[tuple[list[Writable], list[dict[str, Any]]]]:
    """Return the state tensors that this rank writes, and the entry of each optimizer."""
    optimizers, shards = train_state.update.optimizers, train_state.optimizer_shards
    tensors, scalars = local_state(optimizers, shards)
    entries = yield from exchange_optimizer_entries(optimizers, shards, scalars)
    return tensors, entries


def _exchange_extra_state(train_state: TrainState) -> Exchange[dict[str, Any]]:
    """Return each module's extra state, from that of this rank's modules.

    It comes from the first rank that holds a parameter of the module, or of its nearest parent that has parameters.
    """
    world, weights = train_state.world, train_state.weights
    extra_state = get_extra_state(train_state.model)
    if weights.is_unsharded:
        return extra_state
    owned = {name: value for name, value in extra_state.items() if _extra_state_owner(name, weights) == world.rank}
    return first_value_per_key([*(yield owned), extra_state])


def _extra_state_owner(name: str, weights: ShardedTensors) -> int:
    module = name.rpartition(".")[0]
    while module:
        parameters = [parameter for parameter in weights.names if parameter.startswith(f"{module}.")]
        if parameters:
            return writer_rank(weights.shard_specs(parameters[0]))
        module = module.rpartition(".")[0]
    return 0


def _check_groups(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    counts: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    foreign = [key for key in counts if key not in names]
    missing = [name for key, name in names.items() if key not in counts]
    repeated = [names[key] for key, count in counts.items() if count > 1 and key in names]
    if missing or repeated or foreign:
        parts = [
            f"no group holds {first_names(missing)}" if missing else "",
            f"{first_names(repeated)} are in two groups" if repeated else "",
            f"{len(foreign)} parameters in the groups are not trainable parameters of this model" if foreign else "",
        ]
        raise JobError(
            f"optimizer=: {'; '.join(part for part in parts if part)}.",
            cause="every trainable parameter belongs in exactly one group",
            hint="build the groups from the (name, parameter) pairs that the factory receives; a parameter of the loss "
            "trains as part of the model: put the loss's module into model= (docs/loss.md)",
        )
