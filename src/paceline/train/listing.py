"""The names of the model's `state_dict`, and what this rank holds under each of them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.place.holding import Held, Holding
from paceline.place.parts import Part
from paceline.train.apart import tensors_of
from paceline.train.convert import described, first_names
from paceline.train.together import merged
from paceline.world import World


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Name in the `state_dict` to the tensor that stands there; tied names have the same one."""

    entries: Mapping[str, Held]
    weights: Holding

    @property
    def structure(self) -> dict[str, str]:
        """Name to type and shape of the whole tensor."""
        return {name: described(held.dtype, held.part.shape) for name, held in self.entries.items()}

    def num_bytes(self, name: str) -> int:
        """Of the whole tensor."""
        held = self.entries[name]
        return math.prod(held.part.shape) * held.dtype.itemsize

    def wholes(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """One whole tensor after another, on every rank; where ranks hold parts, all of them call this."""
        for name in names:
            held = self.entries[name]
            if self.weights.is_whole:
                yield name, held.find().detach()
            else:
                yield name, self.weights.whole(held.name, held.tensor)


def list_model(model: nn.Module, *, weights: Holding, world: World) -> Listing:
    """Every rank calls this.

    Raises:
        CheckpointError: the `state_dict` has a tensor that is neither parameter nor buffer, and ranks hold parts.
    """
    tensors = tensors_of(model)
    if weights.is_whole:
        return Listing(entries={name: _alone(name, tensor) for name, tensor in tensors.items()}, weights=weights)
    firsts = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    names = world.gather_json({name: firsts.get(id(tensor), "") for name, tensor in tensors.items()})
    known = [{name: first for name, first in said.items() if first in weights.mine} for said in names]
    told = merged([*known, *names])  # a stage may have put something else where a tie's other end was
    unknown = [name for name, first in told.items() if first not in weights.mine]
    if unknown:
        raise CheckpointError(
            f"{first_names(unknown)} of the state_dict can't be saved where ranks hold parts of the model.",
            cause="it is neither a parameter nor a buffer, and how it is cut is not known",
            hint="register_buffer(...), or a layout that keeps the model whole: ddp, zero1, zero2",
        )
    return Listing(entries={name: weights.mine[first] for name, first in told.items()}, weights=weights)


def _alone(name: str, tensor: Tensor) -> Held:
    return Held(name=name, part=Part.all_of(tensor.shape), dtype=tensor.dtype, find=partial(_itself, tensor))


def _itself(tensor: Tensor) -> Tensor:
    return tensor
