"""Training state between two steps: everything a checkpoint holds, and nothing that can be derived."""

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
from paceline.checkpoint.lr_schedule_state import changed_schedules, load_schedule, moved_options, replay
from paceline.checkpoint.optimizer_options import changed_keys, kept_now
from paceline.checkpoint.optimizer_state import Shares, load_options, load_state, optimizer_scalars, own_state
from paceline.checkpoint.shard_ownership import owned_shards, read_part, writer_rank
from paceline.checkpoint.state_dict_view import StateDictView, list_model
from paceline.checkpoint.state_json import from_plain, to_plain, without_job_created
from paceline.checkpoint.state_outside_state_dict import NonPersistentBuffers, extra_state, load_extra_state, tensors_of
from paceline.checkpoint.tensor_bytes import DTYPES, deduplicate_storages, describe_tensor
from paceline.comm.collective_errors import first_value_per_key, on_all_ranks
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
    """The owner of all tensors in a checkpoint: a model and its update, and the shards that every rank holds."""

    model: nn.Module
    update: OptimizerUpdate
    unlisted: NonPersistentBuffers
    weights: ShardedTensors
    shares: Shares

    @property
    def world(self) -> World:
        """The world of all ranks."""
        return self.shares.world

    @property
    def is_whole(self) -> bool:
        """Return whether every rank has all of the state: then the first one writes."""
        return self.weights.is_whole and self.shares.kept.is_whole


def make_optimizers(job: Job, model: nn.Module) -> list[Optimizer]:
    """Call the job's factory and check that every trainable parameter is in exactly one group.

    Raises:
        JobError: a parameter is missing, twice there, or not the model's.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise JobError("the model has no trainable parameter.", hint="parameter.requires_grad_(True)")
    made = job.optimizer(named)
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    check_optimizers(optimizers, {id(p): name for name, p in named})
    return optimizers


def check_optimizers(optimizers: Sequence[Any], names: Mapping[int, str]) -> None:
    """Check that `optimizer=` returned optimizers, and that each of these parameters is in exactly one group.

    Raises:
        JobError: a parameter is missing, twice there, or not the model's.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(
                f"optimizer= returned a {type(optimizer).__name__}, expected a torch.optim.Optimizer.",
                hint="optimizer=lambda named: torch.optim.AdamW([p for _, p in named])",
            )
    _check_groups(optimizers, names)


def files_of(trained: TrainState) -> tuple[dict[str, list[Writable]], dict[str, Any]]:
    """Return the tensors that this rank writes by file, and the JSON that goes with all of them.

    Every rank calls this.

    Raises:
        CheckpointError: something of it can't be saved, on this rank or another.
    """
    weights, shares, world = trained.weights, trained.shares, trained.world
    listing = list_model(trained.model, weights=weights, world=world)
    tensors, aliases = _model_tensors(trained, listing)
    changed = trained.unlisted.changed(weights, world)
    states, scalars = on_all_ranks(world, lambda: own_state(trained.update.optimizers, shares))
    files = _named_files(weights, world.rank, {MODEL: tensors, BUFFERS: changed, EMA: _averages(trained)})
    files |= _named_files(shares.kept, world.rank, {OPTIMIZER: states})
    scaler = trained.update.scaler
    schedules = [to_plain(s.state_dict(), where=type(s).__name__) for s in trained.update.schedules]
    return files, {
        "aliases": aliases,
        "optimizers": optimizer_scalars(trained.update.optimizers, shares, scalars),
        "schedules": [without_job_created(s) for s in schedules],
        "scaler": None if scaler is None else to_plain(scaler.state_dict(), where="the loss scaler"),
        "extra_state": _extra_state(trained),
    }


def load_model(loaded: OpenCheckpoint, trained: TrainState) -> None:
    """Copy a checkpoint's weights and buffers into the model, in place, so that ties and aliases stay.

    Every rank calls this, and reads no more than its own shards.

    Raises:
        CheckpointError: it is another model's, or not what was written.
    """
    stored = loaded.files.get(MODEL, StoredTensors([]))
    aliases: Mapping[str, str] = loaded.state.get("aliases", {})
    listing = list_model(trained.model, weights=trained.weights, world=trained.world)
    on_all_ranks(trained.world, lambda: _check_model(loaded, stored, aliases, listing))
    on_all_ranks(trained.world, lambda: _load_tensors(loaded, stored, aliases, listing, trained))
    load_extra_state(trained.model, loaded.state.get("extra_state", {}))


def _check_model(
    loaded: OpenCheckpoint, stored: StoredTensors, aliases: Mapping[str, str], listing: StateDictView
) -> None:
    wanted = listing.structure
    found = {name: describe_tensor(DTYPES[stored.dtype(name)], stored.shape(name)) for name in stored}
    for name in wanted:
        found.pop(name, None)
        source = aliases.get(name, name)
        if source in stored:
            found[name] = describe_tensor(DTYPES[stored.dtype(source)], stored.shape(source))
    differing = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{loaded.path.name} belongs to a different model: {first_names(differing)} differ.",
            where=str(loaded.path),
            cause=f"{name} is {found.get(name) or 'absent'} in the checkpoint and "
            f"{wanted.get(name) or 'absent'} in the model",
            hint="the same --job.* settings as when it was saved",
        )


def _load_tensors(
    loaded: OpenCheckpoint,
    stored: StoredTensors,
    aliases: Mapping[str, str],
    listing: StateDictView,
    trained: TrainState,
) -> None:
    done: set[tuple[str, str]] = set()
    for name, held in listing.entries.items():
        place = (aliases.get(name, name), held.name)
        target = held.tensor
        if target is not None and place not in done:
            with torch.no_grad():
                copy_into(target, read_part(stored, place[0], part=held.part))
            done.add(place)
    trained.unlisted.restore(loaded.files.get(BUFFERS, StoredTensors([])), trained.weights)


def load_update(
    loaded: OpenCheckpoint, trained: TrainState, *, began: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Load the state of optimizers, schedules, loss scaler and EMA. Every rank calls this.

    `began` is the identity of the run that saved, `now` of this one: changes since then keep their current values.
    """
    on_all_ranks(trained.world, lambda: _load_update(loaded, trained, began, now))


def _load_update(loaded: OpenCheckpoint, trained: TrainState, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    state, update = loaded.state, trained.update
    if len(state["optimizers"]) != len(update.optimizers):
        raise CheckpointError(
            f"the checkpoint has {len(state['optimizers'])} optimizers, but the job builds {len(update.optimizers)}.",
            where=str(loaded.path),
            cause="the job's optimizer= has changed since",
            hint="the job as it was, or a new run with another --run-dir",
        )
    for index, (optimizer, plain) in enumerate(zip(update.optimizers, state["optimizers"], strict=True)):
        changes = _Changes.of(index, began, now)
        for schedule in update.schedules[index : index + 1]:
            if changes.is_moved:
                replay(schedule, steps=loaded.step)
            else:
                load_schedule(schedule, state["schedules"][index])
        if plain["kind"] == type(optimizer).__name__:
            if len(plain["groups"]) == len(optimizer.param_groups):  # else accepted by the user: the job's own groups
                kept = [changes.kept(number, group) for number, group in enumerate(optimizer.param_groups)]
                load_options(optimizer, plain["groups"], kept=kept)
            stored = loaded.files.get(OPTIMIZER, StoredTensors([]))
            load_state(optimizer, plain, stored, shares=trained.shares, prefix=f"{index}/")
    if update.scaler is not None and state.get("scaler"):
        update.scaler.load_state_dict(from_plain(state["scaler"]))
    if update.ema is not None:
        load_ema(loaded, update.ema, weights=trained.weights)


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """The changes to one optimizer and its schedule since the run began: options then and now by group."""

    then: Sequence[Mapping[str, Any]]
    now: Sequence[Mapping[str, Any]]
    has_new_schedule: bool

    @classmethod
    def of(cls, index: int, began: Mapping[str, Any], now: Mapping[str, Any]) -> "_Changes":
        has = now["optimizer"][index]["options"]
        saved = began["optimizer"]
        was = saved[index].get("options", has) if index < len(saved) else has
        schedules = began["schedule"][index : index + 1], now["schedule"][index : index + 1]
        is_new = len(schedules[0]) != len(schedules[1]) or any(changed_schedules(*schedules))
        return cls(then=was if len(was) == len(has) else has, now=has, has_new_schedule=is_new)

    @property
    def is_moved(self) -> bool:
        """Return whether the schedule is replayed from the beginning."""
        options = zip(self.then, self.now, strict=True)
        return self.has_new_schedule or any(changed_keys(then, now) for then, now in options)

    def kept(self, number: int, group: Mapping[str, Any]) -> set[str]:
        """Return the options of a group that keep their current values."""
        if not self.is_moved:
            return set()
        moved = moved_options(group) if self.has_new_schedule else set()
        return kept_now(group, then=self.then[number], now=self.now[number]) | moved


def load_ema(loaded: OpenCheckpoint, ema: Ema, *, weights: ShardedTensors) -> None:
    """Load the EMA; an average that the checkpoint lacks starts at the weights, which were loaded before."""
    stored = loaded.files.get(EMA, StoredTensors([]))
    with torch.no_grad():
        for name, average, live in zip(ema.names, ema.averages, ema.live, strict=True):
            part = weights.mine[name].part
            if name not in stored:
                average.copy_(live)
            elif part.local is not None:
                local_elements(average).copy_(read_part(stored, name, part=part))


def grid_state(grid: FixedPointGrid | None) -> dict[str, int | None]:
    """Return the exponents of the exact sum's grid by FQN."""
    return {} if grid is None else dict(zip(grid.names, grid.exponents, strict=True))


def load_grid(grid: FixedPointGrid | None, state: Mapping[str, int | None]) -> None:
    """Load the exponents of the exact sum's grid."""
    if grid is not None:
        grid.exponents = [state.get(name) for name in grid.names]


def _model_tensors(trained: TrainState, listing: StateDictView) -> tuple[list[Writable], dict[str, str]]:
    """Return weights and persistent buffers, a tied one under its first name, and the other names."""
    weights, rank = trained.weights, trained.world.rank
    if weights.is_whole:
        return deduplicate_storages(tensors_of(trained.model))
    aliases = {name: held.name for name, held in listing.entries.items() if name != held.name}
    found: list[Writable] = []
    for name in dict.fromkeys(held.name for held in listing.entries.values()):
        held = weights.mine[name]
        found += owned_shards(name, dtype=held.dtype, find=held.find, parts=weights.parts(name), rank=rank)
    return found, aliases


def _averages(trained: TrainState) -> list[Writable]:
    ema, rank = trained.update.ema, trained.world.rank
    found: list[Writable] = []
    for name, tensor in zip(ema.names, ema.averages, strict=True) if ema is not None else ():
        parts = trained.weights.parts(name)
        found += owned_shards(name, dtype=tensor.dtype, find=partial(local_elements, tensor), parts=parts, rank=rank)
    return found


def _named_files(holding: ShardedTensors, rank: int, found: Mapping[str, list[Writable]]) -> dict[str, list[Writable]]:
    """Return the tensors by file: the first rank's files if ranks hold everything, else each rank's own."""
    if holding.is_whole:
        always = (MODEL, OPTIMIZER)
        return {kind: tensors for kind, tensors in found.items() if rank == 0 and (tensors or kind in always)}
    return {rank_file(kind, rank): tensors for kind, tensors in found.items() if tensors}


def _extra_state(trained: TrainState) -> dict[str, Any]:
    """Return each module's extra state, from the first rank that holds a part of it or of its nearest parent."""
    world, weights = trained.world, trained.weights
    mine = on_all_ranks(world, lambda: extra_state(trained.model))
    if weights.is_whole:
        return mine
    own = {name: value for name, value in mine.items() if _speaks(name, weights) == world.rank}
    return first_value_per_key([*world.gather_json(own), mine])


def _speaks(name: str, weights: ShardedTensors) -> int:
    module = name.rpartition(".")[0]
    while module:
        inside = [first for first in weights.names if first.startswith(f"{module}.")]
        if inside:
            return writer_rank(weights.parts(inside[0]))
        module = module.rpartition(".")[0]
    return 0


def _check_groups(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    seen: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    foreign = [number for number in seen if number not in names]
    missing = [name for number, name in names.items() if number not in seen]
    twice = [names[number] for number, times in seen.items() if times > 1 and number in names]
    if missing or twice or foreign:
        parts = [
            f"no group holds {first_names(missing)}" if missing else "",
            f"{first_names(twice)} are in two groups" if twice else "",
            f"{len(foreign)} parameters in its groups are not trainable parameters of this model" if foreign else "",
        ]
        raise JobError(
            f"optimizer=: {'; '.join(part for part in parts if part)}.",
            cause="every trainable parameter belongs in exactly one group",
            hint="build the groups from the (name, parameter) pairs that the factory is given; a parameter of the loss "
            "trains as part of the model: put the loss's module into model= (docs/loss.md)",
        )
