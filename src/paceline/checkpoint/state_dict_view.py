"""A view of the model's `state_dict`: each name with this rank's tensor, which may be a shard."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from paceline.checkpoint.state_outside_state_dict import state_dict_tensors
from paceline.checkpoint.tensor_bytes import describe_tensor
from paceline.comm.collective_errors import first_value_per_key
from paceline.comm.exchange import Exchange, run_exchange
from paceline.comm.process_group import World
from paceline.console.formatting import first_names
from paceline.errors import CheckpointError
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.module_access.sharded_tensors import LocalTensor, ShardedTensors


@dataclass(frozen=True, kw_only=True)
class StateDictView:
    """A map from names in the `state_dict` to tensors; tied names map to the same tensor."""

    entries: Mapping[str, LocalTensor]
    weights: ShardedTensors

    @property
    def structure(self) -> dict[str, str]:
        """Return the type and shape of each full tensor by name."""
        return {name: describe_tensor(local.dtype, local.shard_spec.shape) for name, local in self.entries.items()}

    def full_tensors(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield one full tensor after another, on every rank; if ranks hold shards, every rank must call this."""
        for name in names:
            local = self.entries[name]
            if self.weights.is_unsharded:
                yield name, local.get_tensor().detach()
            else:
                yield name, self.weights.gather_full_tensor(local.name, local.tensor)


def view_state_dict(model: nn.Module, *, weights: ShardedTensors, world: World) -> StateDictView:
    """Return the view of a model's `state_dict`. Every rank calls this.

    Raises:
        CheckpointError: the `state_dict` has a tensor that is neither parameter nor buffer, and ranks hold shards.
    """
    return run_exchange(world, exchange_view(model, weights=weights))


def exchange_view(model: nn.Module, *, weights: ShardedTensors) -> Exchange[StateDictView]:
    """Do the same as `view_state_dict`, as an exchange."""
    tensors = state_dict_tensors(model)
    if weights.is_unsharded:
        return StateDictView(
            entries={name: _full_entry(name, tensor) for name, tensor in tensors.items()}, weights=weights
        )
    name_by_id = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    # by rank: the name in the `state_dict`, and the parameter or buffer that it belongs to ("" if there is none)
    names = yield {name: name_by_id.get(id(tensor), "") for name, tensor in tensors.items()}
    known_names = [
        {name: weight for name, weight in rank_names.items() if weight in weights.local_tensors} for rank_names in names
    ]
    # known names come first, because a pipeline stage may hold a placeholder under a tied name
    weight_names = first_value_per_key([*known_names, *names])
    unknown = [name for name, weight in weight_names.items() if weight not in weights.local_tensors]
    if unknown:
        raise CheckpointError(
            f"{first_names(unknown)} of the state_dict can't be saved, because ranks hold shards of the model.",
            cause="it is neither a parameter nor a buffer, so its sharding is not known",
            hint="register_buffer(...), or a layout that does not shard the model: ddp, zero1, zero2",
        )
    return StateDictView(
        entries={name: weights.local_tensors[weight] for name, weight in weight_names.items()}, weights=weights
    )


def _full_entry(name: str, tensor: Tensor) -> LocalTensor:
    return LocalTensor(
        name=name,
        shard_spec=ShardSpec.full(tensor.shape),
        dtype=tensor.dtype,
        get_tensor=partial(_return_tensor, tensor),
    )


def _return_tensor(tensor: Tensor) -> Tensor:
    return tensor
