"""Optimizer state by parameter name. Tensors of the parameter's shape are sharded like it; one rank writes the rest."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn, strided
from torch.optim import Optimizer

from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.optimizer_options import KERNEL_OPTIONS
from paceline.checkpoint.shard_ownership import owned_shards, read_shard, writer_rank
from paceline.checkpoint.state_json import decode_state, encode_state, remove_unwritable_values, unwritable_kind
from paceline.checkpoint.tensor_bytes import from_bytes, to_bytes
from paceline.comm.collective_errors import first_value_per_key
from paceline.comm.exchange import Exchange
from paceline.comm.process_group import World
from paceline.errors import CheckpointError
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.module_access.sharded_tensors import ShardedTensors

NESTED_PREFIX = "+"  # prefix of the number that names a tensor in a list or dict
NO_PARAMETER = ""  # the name for state that belongs to no parameter


@dataclass(frozen=True, kw_only=True)
class OptimizerShards:
    """The parameters in the optimizers of all ranks: `parameters` are this rank's, `sharded` describes their shards."""

    parameters: Sequence[NamedParameter]
    sharded: ShardedTensors
    world: World

    @property
    def parameter_names(self) -> dict[int, str]:
        """Return the parameter names by `id(parameter)`."""
        return {id(member.parameter): member.name for member in self.parameters}

    def local_shard(self, name: str) -> ShardSpec:
        """Return this rank's shard of a parameter."""
        return self.sharded.shard_specs(name)[self.world.rank]

    def merge_names(self, names: Sequence[Sequence[str]]) -> list[str]:
        """Return the union of the ranks' names, each once, in the model's order."""
        union = {name for rank_names in names for name in rank_names}
        return [name for name in self.sharded.names if name in union]


def group_names(optimizers: Sequence[Optimizer], shards: OptimizerShards) -> list[list[list[str]]]:
    """Return the names of all ranks' parameters, per optimizer and group. Every rank calls this."""
    local_names = _local_group_names(optimizers, shards)
    if shards.sharded.is_unsharded:
        return local_names
    return _merge_group_names(shards.world.gather_json(local_names), shards)


def _local_group_names(optimizers: Sequence[Optimizer], shards: OptimizerShards) -> list[list[list[str]]]:
    """Return the names of this rank's parameters, per optimizer and group."""
    name_by_id = shards.parameter_names
    return [[[name_by_id[id(p)] for p in group["params"]] for group in o.param_groups] for o in optimizers]


def _merge_group_names(
    names_by_rank: Sequence[list[list[list[str]]]], shards: OptimizerShards
) -> list[list[list[str]]]:
    return [
        [shards.merge_names([names[index][group] for names in names_by_rank]) for group in range(len(groups))]
        for index, groups in enumerate(names_by_rank[0])
    ]


def local_state(
    optimizers: Sequence[Optimizer], shards: OptimizerShards
) -> tuple[list[Writable], list[dict[str, Any]]]:
    """Return the state tensors that this rank writes, and its other state as JSON: by parameter, for each optimizer.

    Tensors in lists and dicts are stored with the others under a number, to which the JSON refers. State that belongs
    to no parameter is stored under the empty name, as a list of keys and values.

    Raises:
        CheckpointError: a key or a value can't be written, or it is unknown how a tensor is sharded.
    """
    tensors: list[Writable] = []
    scalars: list[dict[str, Any]] = []
    name_by_id = shards.parameter_names
    for index, optimizer in enumerate(optimizers):
        scalars.append({})
        kind = type(optimizer).__name__
        for parameter, state in optimizer.state.items():
            if id(parameter) not in name_by_id:
                continue
            name = name_by_id[id(parameter)]
            state_tensors, encoded = split_state(state, name=name, kind=kind)
            for key, value in state_tensors.items():
                tensors += _writable_tensors(f"{index}/{name}/{key}", value, name, parameter, shards, kind)
            if encoded and writer_rank(shards.sharded.shard_specs(name)) == shards.world.rank:
                scalars[-1][name] = encoded
        shared_values, nested = shared_state(optimizer, shards)
        tensors += [to_bytes(f"{index}//{key}", value) for key, value in nested.items() if shards.world.rank == 0]
        if shared_values:
            scalars[-1][NO_PARAMETER] = shared_values
    return tensors, scalars


def split_state(
    state: Mapping[Any, Any], *, name: str, kind: str, accepts: Callable[[Tensor], bool] = lambda _: True
) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a parameter's state by the name that each is stored under, and the rest as JSON.

    A tensor in a list or dict, or under a key that can't be a name, is stored under a number that the JSON contains.
    A tensor that `accepts` rejects becomes JSON too.

    Raises:
        CheckpointError: a value can't be written: after a resume it would be silently absent.
    """
    tensors = {key: value for key, value in state.items() if _is_plain_tensor(key, value) and accepts(value)}
    nested: dict[str, Tensor] = {}
    store = partial(_store_nested, nested, accepts)
    values = {key: value for key, value in state.items() if key not in tensors}
    encoded = encode_state(values, where=f"the state of {kind} for {name}", store=store)
    if unwritable_kind(encoded):
        encoded_by_key = {
            key: encode_state([key, value], where=kind, store=_placeholder_name) for key, value in values.items()
        }
        bad_key = next(key for key, pair in encoded_by_key.items() if unwritable_kind(pair))
        raise _unwritable_error(f"the state {bad_key!r} of {kind} for {name}", unwritable_kind(encoded))
    return {**tensors, **nested}, encoded


def _unwritable_error(description: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{description} can't be saved: it is or contains a {kind}.",
        cause="checkpoints contain no pickle, so the resumed optimizer would lack this value",
        hint="store tensors, numbers, text, or lists, tuples, sets and dicts of these",
    )


def _is_plain_tensor(key: Any, value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is strided
        and not value.is_quantized
        and isinstance(key, str)
        and "/" not in key
        and not key.startswith(NESTED_PREFIX)
    )


def _placeholder_name(_: Tensor) -> str:
    return NESTED_PREFIX


def _store_nested(nested: dict[str, Tensor], accepts: Callable[[Tensor], bool], value: Tensor) -> str | None:
    if not accepts(value):
        return None
    name = f"{NESTED_PREFIX}{len(nested)}"
    nested[name] = value
    return name


def shared_state(optimizer: Optimizer, shards: OptimizerShards) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the state under keys that are not parameters, such as a common step count, as JSON and tensors.

    Raises:
        CheckpointError: a key or a value can't be written, or it is unknown how a tensor is sharded.
    """
    kind, names = type(optimizer).__name__, shards.parameter_names
    values = {key: value for key, value in optimizer.state.items() if id(key) not in names}
    addresses = {address for m in shards.parameters for address in (id(m.parameter), m.parameter.data_ptr())}
    nested: dict[str, Tensor] = {}
    store = partial(_store_nested, nested, lambda _: True)
    pairs = []
    for key, value in values.items():
        is_tensor = isinstance(key, Tensor)
        encoded_key = None if is_tensor else encode_state(key, where=kind)
        if is_tensor or unwritable_kind(encoded_key) or key in addresses:
            raise CheckpointError(
                f"the state of {kind} has a key that can't be saved: "
                + (
                    "a tensor that is not a parameter of this model."
                    if is_tensor
                    else f"{key!r}, which is different after a resume."
                ),
                cause="state[...] keyed by an address, which differs after a resume, or by a "
                "tensor that is in no group",
                hint="self.state[parameter], with the parameters of self.param_groups",
            )
        pairs.append([encoded_key, encode_state(value, where=kind, store=store)])
        if unwritable_kind(pairs[-1][1]):
            raise _unwritable_error(f"the state of {kind} under {key!r}", unwritable_kind(pairs[-1][1]))
    if nested and not shards.sharded.is_unsharded:
        raise _unassigned_state_error(kind, [pair[0] for pair in pairs])
    return pairs, nested


def _unassigned_state_error(kind: str, keys: Sequence[Any]) -> CheckpointError:
    return CheckpointError(
        f"the state of {kind} under {', '.join(map(str, keys)) or 'some keys'} belongs to no parameter. It can't "
        "be saved, because the parameters are sharded and every rank has its own copy of this state.",
        cause="state[...] keyed by a number or a name; its sharding is not known",
        hint="self.state[parameter] in the optimizer, or --layout ddp",
    )


def _writable_tensors(
    key: str, value: Tensor, name: str, parameter: Tensor, shards: OptimizerShards, optimizer: str
) -> list[Writable]:
    shard_specs, rank = shards.sharded.shard_specs(name), shards.world.rank
    if value.shape == parameter.shape:
        get_tensor = partial(Tensor.detach, value)
        return owned_shards(key, dtype=value.dtype, get_tensor=get_tensor, shard_specs=shard_specs, rank=rank)
    if not shard_specs[rank].is_full and shard_specs[rank].boxes and value.numel() > 1:
        raise CheckpointError(
            f"the state {key.rpartition('/')[2]} of {optimizer} for {name} can't be saved: it has the shape "
            f"{list(value.shape)}, and this rank holds a shard of the parameter.",
            cause="the optimizer needs full parameters, but was given a shard",
            hint="a layout that does not shard parameters: --layout ddp",
        )
    return [to_bytes(key, value)] if writer_rank(shard_specs) == rank else []


def exchange_optimizer_entries(
    optimizers: Sequence[Optimizer], shards: OptimizerShards, scalars: Sequence[Mapping[str, Any]]
) -> Exchange[list[dict[str, Any]]]:
    """Return the checkpoint's entry for each optimizer, without tensors.

    `scalars` is the second result of `local_state`.

    Raises:
        CheckpointError: state that belongs to no parameter differs between the ranks.
    """
    scalars_by_rank, names = [scalars], _local_group_names(optimizers, shards)
    if not shards.sharded.is_unsharded:
        answers = yield [list(scalars), names]
        scalars_by_rank = [rank_scalars for rank_scalars, _ in answers]
        names = _merge_group_names([rank_names for _, rank_names in answers], shards)
    entries = []
    for index, (optimizer, groups) in enumerate(zip(optimizers, names, strict=True)):
        group_entries = [
            {
                "names": parameter_names,
                "options": encode_state({k: v for k, v in group.items() if k != "params"}, where="a parameter group"),
            }
            for parameter_names, group in zip(groups, optimizer.param_groups, strict=True)
        ]
        all_scalars = first_value_per_key(rank_scalars[index] for rank_scalars in scalars_by_rank)
        shared_values = all_scalars.get(NO_PARAMETER, [])
        if any(rank_scalars[index].get(NO_PARAMETER, []) != shared_values for rank_scalars in scalars_by_rank):
            raise _unassigned_state_error(type(optimizer).__name__, [key for key, _ in shared_values])
        entries.append({"kind": type(optimizer).__name__, "scalars": all_scalars, "groups": group_entries})
    return entries


def load_group_options(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], *, excluded: Sequence[Collection[str]]
) -> None:
    """Load the saved options of each group, except those in `excluded` and those that a checkpoint can't hold."""
    for group, saved, excluded_keys in zip(optimizer.param_groups, groups, excluded, strict=True):
        for key, value in decode_state(remove_unwritable_values(saved["options"])).items():
            if key not in KERNEL_OPTIONS and key not in excluded_keys:
                group[key] = _move_to_device_of(value, group.get(key))


def _move_to_device_of(value: Any, current: Any) -> Any:
    """Return a tensor on the device of `current`: with `capturable=True`, a learning rate is on the GPU."""
    return value.to(current.device) if isinstance(value, Tensor) and isinstance(current, Tensor) else value


def load_optimizer_state(
    optimizer: Optimizer, saved: Mapping[str, Any], stored: StoredTensors, *, shards: OptimizerShards, prefix: str
) -> None:
    """Load the state of each parameter of this rank, sharded like the parameter.

    `saved` is the checkpoint's entry for this optimizer, and `prefix` begins the names of its tensors. If this rank has
    no element of a parameter, nothing is loaded for it.

    Raises:
        CheckpointError: stored bytes do not match their digest.
    """
    keys: dict[str, list[str]] = {}  # of stored tensors, by parameter name
    for key in stored:
        if key.startswith(prefix):
            keys.setdefault(key.removeprefix(prefix).rpartition("/")[0], []).append(key)
    names = shards.parameter_names
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            shard = shards.local_shard(name)
            is_saved = name in keys or name in saved["scalars"]
            if is_saved and (shard.boxes or shard.is_full):
                fetch = partial(_fetch_nested, stored, f"{prefix}{name}/", shard, parameter)
                state = decode_state(saved["scalars"].get(name, {}), fetch=fetch)
                leaves = {key: key.rpartition("/")[2] for key in keys.get(name, [])}
                direct_state = {
                    leaf: _read_tensor(stored, key, shard)
                    for key, leaf in leaves.items()
                    if not leaf.startswith(NESTED_PREFIX)
                }
                optimizer.state[parameter] = {
                    **state,
                    **{k: _to_parameter_device(k, v, parameter) for k, v in direct_state.items()},
                }
    for key, value in saved["scalars"].get(NO_PARAMETER, []):
        decoded = decode_state(value, fetch=lambda number: from_bytes(stored[f"{prefix}/{number}"]))
        optimizer.state[decode_state(key)] = decoded


def _fetch_nested(stored: StoredTensors, prefix: str, shard: ShardSpec, parameter: nn.Parameter, key: str) -> Tensor:
    return _to_parameter_device(key, _read_tensor(stored, f"{prefix}{key}", shard), parameter)


def _read_tensor(stored: StoredTensors, key: str, shard: ShardSpec) -> Tensor:
    if stored.shape(key) == shard.shape:
        return read_shard(stored, key, shard=shard)
    return from_bytes(stored[key])


def _to_parameter_device(key: str, value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return the state on its parameter's device. A step count is not moved."""
    return value if key == "step" else value.to(parameter.device)
