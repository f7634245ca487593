"""Load a model whose weights are in files: each rank reads only its shards.

No rank builds the full model, with two exceptions. If the constructor can't be recorded, every rank builds the model
once before the weights are read. `load_full_model` returns the full model.
"""

import copy
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paceline.parallel.initialization.init_tape import InitTape, RecordedView, Unrecordable
from paceline.parallel.initialization.meta_model import (
    named_tensors,
    record_model,
    release_memory,
    replace_tensors,
    with_data,
)
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs

LoadedShards = tuple[dict[str, Tensor], list[str]]
"""Shards by the first name of each tensor (a tied tensor has several names), and notes for the user."""


@runtime_checkable
class PretrainedModel(Protocol):
    """A job's `model` that can build its skeleton without weights, and can read shards of the weights."""

    def skeleton(self) -> nn.Module:
        """Return the model as its constructor leaves it, without the weights of the files."""

    def load(self, model: nn.Module, shard_specs: ShardSpecs) -> LoadedShards:
        """Return this rank's shards of the tensors in the files, by the first name of each, and notes."""

    def __call__(self) -> nn.Module:
        """Return the full model with its weights."""


@dataclass(frozen=True, kw_only=True)
class PretrainedValues:
    """A source of values from files; tensors that the files lack (buffers, new heads) get the constructor's values.

    `tape`, `views` and `real_tensors` hold these values; they are those of a `RecordedModel`.
    """

    pretrained: PretrainedModel
    model: nn.Module
    tape: InitTape
    views: dict[str, RecordedView]
    real_tensors: dict[str, Tensor]
    device: torch.device
    is_local: bool = False

    def with_unsharded_model(self) -> "PretrainedValues":
        """Return the same source with an unsharded copy of the model, which provides names and shapes."""
        return replace(self, model=copy.deepcopy(self.model))

    def values(self, shard_specs: ShardSpecs) -> tuple[dict[str, Tensor], list[str]]:
        """Return this rank's shards, and notes."""
        values, notes = self.pretrained.load(self.model, shard_specs)
        values = {name: value.to(self.device) for name, value in values.items()}
        for name, shard_spec in shard_specs.items():
            if name not in values and shard_spec.local_shape is not None:
                full_tensor = (
                    self.real_tensors[name]
                    if name in self.real_tensors
                    else self.tape.compute_values(self.views[name])[0]
                )
                values[name] = shard_spec.extract(full_tensor).to(self.device)
        return values, notes


def open_pretrained(
    pretrained: PretrainedModel, *, seed: int, device: torch.device
) -> tuple[PretrainedValues, list[str]]:
    """Build the skeleton on the meta device; return the source of its values, and notes.

    If its constructor can't be recorded, each rank builds the skeleton once in memory.
    """
    tape, views, notes = InitTape(seed=seed), dict[str, RecordedView](), list[str]()
    try:
        recorded = record_model(pretrained.skeleton, seed=seed)
        model, tape = recorded.model, recorded.tape
        views, real_tensors = dict(recorded.views), dict(recorded.real_tensors)
    except Unrecordable as error:
        model = pretrained.skeleton()
        real_tensors = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
        notes.append(f"start: every rank builds the model once before the weights are read, because {error}")
        release_memory(model)
    return PretrainedValues(
        pretrained=pretrained, model=model, tape=tape, views=views, real_tensors=real_tensors, device=device
    ), notes


def load_full_model(pretrained: PretrainedModel, *, seed: int) -> nn.Module:
    """Return the full model with its weights in this process."""
    source, _ = open_pretrained(pretrained, seed=seed, device=torch.device("cpu"))
    tensors = named_tensors(source.model)
    full_specs = {name: ShardSpec.full(tensor.shape) for name, tensor in tensors.items()}
    values, _ = source.values(full_specs)
    replace_tensors(source.model, {name: with_data(tensors[name], value) for name, value in values.items()})
    return source.model
