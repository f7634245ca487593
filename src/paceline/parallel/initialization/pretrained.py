"""Loading of a model whose weights are in files: each rank reads only its shards, and none builds the full model."""

import copy
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paceline.parallel.initialization.init_tape import InitTape, RecordedView, Unrecordable
from paceline.parallel.initialization.meta_model import named_tensors, put_tensors, record, release_memory, with_data
from paceline.parallel.module_access.shard_spec import Parts, ShardSpec

Loaded = tuple[dict[str, Tensor], list[str]]


@runtime_checkable
class PretrainedModel(Protocol):
    """A job's `model` that can build its skeleton without weights, and can read shards of them."""

    def skeleton(self) -> nn.Module:
        """Return the model as its constructor leaves it."""

    def load(self, model: nn.Module, parts: Parts) -> Loaded:
        """Return this rank's shards of the tensors in the files, by the first name of each, and notes."""

    def __call__(self) -> nn.Module:
        """Return the full model with its weights."""


@dataclass(frozen=True, kw_only=True)
class FromFiles:
    """A source of values from files; tensors that the files lack (buffers, new heads) get the constructor's values."""

    stored: PretrainedModel
    model: nn.Module
    tape: InitTape
    views: dict[str, RecordedView]
    real: dict[str, Tensor]
    device: torch.device
    apiece: bool = False

    def apart(self) -> "FromFiles":
        """Return the same source with an unsharded copy of the model, from which it reads names and shapes."""
        return replace(self, model=copy.deepcopy(self.model))

    def values(self, parts: Parts) -> tuple[dict[str, Tensor], list[str]]:
        """Return this rank's shards, and notes."""
        found, notes = self.stored.load(self.model, parts)
        found = {name: value.to(self.device) for name, value in found.items()}
        for name, part in parts.items():
            if name not in found and part.local is not None:
                whole = self.real[name] if name in self.real else self.tape.values(self.views[name])[0]
                found[name] = part.take(whole).to(self.device)
        return found, notes


def from_files(stored: PretrainedModel, *, seed: int, device: torch.device) -> tuple[FromFiles, list[str]]:
    """Return the source of a model on the meta device; if it can't be recorded, each rank builds the skeleton once."""
    tape, views, notes = InitTape(seed=seed), dict[str, RecordedView](), list[str]()
    try:
        recorded = record(stored.skeleton, seed=seed)
        model, tape, views, real = recorded.model, recorded.tape, dict(recorded.views), dict(recorded.real)
    except Unrecordable as error:
        model = stored.skeleton()
        real = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
        notes.append(f"start: every rank builds the model once before it reads its weights, because {error}")
        release_memory(model)
    return FromFiles(stored=stored, model=model, tape=tape, views=views, real=real, device=device), notes


def whole_model(stored: PretrainedModel, *, seed: int) -> nn.Module:
    """Return the full model with its weights in this process."""
    source, _ = from_files(stored, seed=seed, device=torch.device("cpu"))
    tensors = named_tensors(source.model)
    wanted = {name: ShardSpec.all_of(tensor.shape) for name, tensor in tensors.items()}
    values, _ = source.values(wanted)
    put_tensors(source.model, {name: with_data(tensors[name], value) for name, value in values.items()})
    return source.model
