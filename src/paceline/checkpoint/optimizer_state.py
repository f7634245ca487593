"""Optimizer state by name: tensors shaped like their parameter are sharded like it, the rest is written once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn, strided
from torch.optim import Optimizer

from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.optimizer_options import KERNELS
from paceline.checkpoint.shard_ownership import owned_shards, read_part, writer_rank
from paceline.checkpoint.state_json import from_plain, job_created_kind, to_plain, without_job_created
from paceline.checkpoint.tensor_bytes import from_bytes, to_bytes
from paceline.comm.collective_errors import first_value_per_key
from paceline.comm.process_group import World
from paceline.errors import CheckpointError
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.module_access.sharded_tensors import ShardedTensors

INNER = "+"  # before the number of a tensor that stands in a list or dict
NO_PARAMETER = ""  # the name of what belongs to no parameter


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The parameters in the optimizers of all ranks: `named` are this rank's, `kept` says which shard each is."""

    named: Sequence[NamedParameter]
    kept: ShardedTensors
    world: World

    @property
    def names(self) -> dict[int, str]:
        """Return the parameter names by `id(parameter)`."""
        return {id(member.parameter): member.name for member in self.named}

    def part(self, name: str) -> ShardSpec:
        """Return this rank's shard of a parameter."""
        return self.kept.parts(name)[self.world.rank]

    def together(self, names: Sequence[Sequence[str]]) -> list[str]:
        """Return the union of the ranks' names, each once, in the model's order."""
        found = {name for each in names for name in each}
        return [name for name in self.kept.names if name in found]


def group_names(optimizers: Sequence[Optimizer], shares: Shares) -> list[list[list[str]]]:
    """Return the parameters over all ranks, per optimizer and group. Every rank calls this."""
    names = shares.names
    mine = [[[names[id(p)] for p in group["params"]] for group in o.param_groups] for o in optimizers]
    if shares.kept.is_whole:
        return mine
    told = shares.world.gather_json(mine)
    return [
        [shares.together([said[number][index] for said in told]) for index in range(len(groups))]
        for number, groups in enumerate(mine)
    ]


def own_state(optimizers: Sequence[Optimizer], shares: Shares) -> tuple[list[Writable], list[dict[str, Any]]]:
    """Return the tensors that this rank writes, and its scalars as JSON, per optimizer by name.

    Tensors in lists and dicts are stored with the others under a number, and the JSON names them. State that belongs to
    no parameter is stored under the empty name, as a list of keys and values.

    Raises:
        CheckpointError: a state can't be sharded like its parameter, or exists on one rank only.
    """
    tensors: list[Writable] = []
    scalars: list[dict[str, Any]] = []
    names = shares.names
    for index, optimizer in enumerate(optimizers):
        scalars.append({})
        kind = type(optimizer).__name__
        for parameter, state in optimizer.state.items():
            if id(parameter) not in names:
                continue
            name = names[id(parameter)]
            found, plain = split_state(state, name=name, kind=kind)
            for key, value in found.items():
                tensors += _own(f"{index}/{name}/{key}", value, name, parameter, shares, kind)
            if plain and writer_rank(shares.kept.parts(name)) == shares.world.rank:
                scalars[-1][name] = plain
        shared, inner = shared_state(optimizer, shares)
        tensors += [to_bytes(f"{index}//{key}", value) for key, value in inner.items() if shares.world.rank == 0]
        if shared:
            scalars[-1][NO_PARAMETER] = shared
    return tensors, scalars


def split_state(
    state: Mapping[Any, Any], *, name: str, kind: str, takes: Callable[[Tensor], bool] = lambda _: True
) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a parameter's state by the name that each is stored under, and the rest as JSON.

    A tensor in a list or dict, or under a key that is no plain text, has a number for a name, and the JSON says which.
    A tensor that `takes` refuses becomes JSON too.

    Raises:
        CheckpointError: a value can't be written: after a resume it would be silently absent.
    """
    tensors = {key: value for key, value in state.items() if _is_plain_tensor(key, value) and takes(value)}
    inner: dict[str, Tensor] = {}
    keep = partial(_numbered, inner, takes)
    rest = {key: value for key, value in state.items() if key not in tensors}
    plain = to_plain(rest, where=f"the state of {kind} for {name}", keep=keep)
    if job_created_kind(plain):
        alone = {key: to_plain([key, value], where=kind, keep=_named_once) for key, value in rest.items()}
        bad = next(key for key, said in alone.items() if job_created_kind(said))
        raise _unwritable(f"the state {bad!r} of {kind} for {name}", job_created_kind(plain))
    return {**tensors, **inner}, plain


def _unwritable(what: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{what} can't be saved: it is or contains a {kind}.",
        cause="checkpoints contain no pickle, so a resumed optimizer would lack it",
        hint="store tensors, numbers, text, or lists, tuples, sets and dicts of these",
    )


def _is_plain_tensor(key: Any, value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is strided
        and not value.is_quantized
        and isinstance(key, str)
        and "/" not in key
        and not key.startswith(INNER)
    )


def _named_once(_: Tensor) -> str:
    return INNER


def _numbered(inner: dict[str, Tensor], takes: Callable[[Tensor], bool], value: Tensor) -> str | None:
    if not takes(value):
        return None
    name = f"{INNER}{len(inner)}"
    inner[name] = value
    return name


def shared_state(optimizer: Optimizer, shares: Shares) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the `state` under keys that are no parameters, such as a common step count: JSON, and its tensors.

    Raises:
        CheckpointError: a key or a value can't be written, or it is unknown how a tensor is sharded.
    """
    kind, names = type(optimizer).__name__, shares.names
    rest = {key: value for key, value in optimizer.state.items() if id(key) not in names}
    addresses = {number for m in shares.named for number in (id(m.parameter), m.parameter.data_ptr())}
    inner: dict[str, Tensor] = {}
    keep = partial(_numbered, inner, lambda _: True)
    found = []
    for key, value in rest.items():
        is_tensor = isinstance(key, Tensor)
        plain = None if is_tensor else to_plain(key, where=kind)
        if is_tensor or job_created_kind(plain) or key in addresses:
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
        found.append([plain, to_plain(value, where=kind, keep=keep)])
        if job_created_kind(found[-1][1]):
            raise _unwritable(f"the state of {kind} under {key!r}", job_created_kind(found[-1][1]))
    if inner and not shares.kept.is_whole:
        raise _unassigned_state(kind, [pair[0] for pair in found])
    return found, inner


def _unassigned_state(kind: str, keys: Sequence[Any]) -> CheckpointError:
    return CheckpointError(
        f"the state of {kind} under {', '.join(map(str, keys)) or 'some keys'} belongs to no parameter. The parameters "
        "are sharded: each rank would keep its own copy.",
        cause="state[...] keyed by a number or a name; its sharding is not known",
        hint="self.state[parameter] in the optimizer, or --layout ddp",
    )


def _own(key: str, value: Tensor, name: str, parameter: Tensor, shares: Shares, optimizer: str) -> list[Writable]:
    parts, rank = shares.kept.parts(name), shares.world.rank
    if value.shape == parameter.shape:
        return owned_shards(key, dtype=value.dtype, find=partial(Tensor.detach, value), parts=parts, rank=rank)
    if not parts[rank].is_all and parts[rank].boxes and value.numel() > 1:
        raise CheckpointError(
            f"the state {key.rpartition('/')[2]} of {optimizer} for {name} can't be saved: it has the shape "
            f"{list(value.shape)}, and this rank holds a part of the parameter.",
            cause="an optimizer that needs whole tensors was given a part of one",
            hint="a layout that keeps parameters whole: ddp",
        )
    return [to_bytes(key, value)] if writer_rank(parts) == rank else []


def optimizer_scalars(
    optimizers: Sequence[Optimizer], shares: Shares, scalars: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a checkpoint's entry for each optimizer, without its tensors. Every rank calls this."""
    told = [scalars] if shares.kept.is_whole else shares.world.gather_json(list(scalars))
    every = group_names(optimizers, shares)
    found = []
    for index, (optimizer, groups) in enumerate(zip(optimizers, every, strict=True)):
        said = [
            {
                "names": names,
                "options": to_plain({k: v for k, v in group.items() if k != "params"}, where="a parameter group"),
            }
            for names, group in zip(groups, optimizer.param_groups, strict=True)
        ]
        all_scalars = first_value_per_key(each[index] for each in told)
        shared = all_scalars.get(NO_PARAMETER, [])
        if any(each[index].get(NO_PARAMETER, []) != shared for each in told):
            raise _unassigned_state(type(optimizer).__name__, [key for key, _ in shared])
        found.append({"kind": type(optimizer).__name__, "scalars": all_scalars, "groups": said})
    return found


def load_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], *, kept: Sequence[Collection[str]]) -> None:
    """Load the saved options of each group, without those in `kept`; unwritable ones stay as the job makes them."""
    for group, saved, own in zip(optimizer.param_groups, groups, kept, strict=True):
        for key, value in from_plain(without_job_created(saved["options"])).items():
            if key not in KERNELS and key not in own:
                group[key] = _beside(value, group.get(key))


def _beside(value: Any, present: Any) -> Any:
    """Return a tensor on the device of the present one: a captured optimizer has its learning rate on the device."""
    return value.to(present.device) if isinstance(value, Tensor) and isinstance(present, Tensor) else value


def load_state(
    optimizer: Optimizer, plain: Mapping[str, Any], stored: StoredTensors, *, shares: Shares, prefix: str
) -> None:
    """Load the state of each parameter of this rank, sharded like the parameter.

    If a rank holds nothing of a parameter, nothing is loaded for it.

    Raises:
        CheckpointError: a piece of it is not what was written.
    """
    keys: dict[str, list[str]] = {}
    for key in stored:
        if key.startswith(prefix):
            keys.setdefault(key.removeprefix(prefix).rpartition("/")[0], []).append(key)
    names = shares.names
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            part = shares.part(name)
            known = name in keys or name in plain["scalars"]
            if known and (part.boxes or part.is_all):
                find = partial(_found, stored, f"{prefix}{name}/", part, parameter)
                state = from_plain(plain["scalars"].get(name, {}), find=find)
                leaves = {key: key.rpartition("/")[2] for key in keys.get(name, [])}
                own = {leaf: _loaded(stored, key, part) for key, leaf in leaves.items() if not leaf.startswith(INNER)}
                optimizer.state[parameter] = {**state, **{k: _placed(k, v, parameter) for k, v in own.items()}}
    for key, value in plain["scalars"].get(NO_PARAMETER, []):
        whole = from_plain(value, find=lambda inner: from_bytes(stored[f"{prefix}/{inner}"]))
        optimizer.state[from_plain(key)] = whole


def _found(stored: StoredTensors, prefix: str, part: ShardSpec, parameter: nn.Parameter, inner: str) -> Tensor:
    return _placed(inner, _loaded(stored, f"{prefix}{inner}", part), parameter)


def _loaded(stored: StoredTensors, key: str, part: ShardSpec) -> Tensor:
    if stored.shape(key) == part.shape:
        return read_part(stored, key, part=part)
    return from_bytes(stored[key])


def _placed(key: str, value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return the state on its parameter's device; a step count stays where the optimizer keeps it."""
    return value if key == "step" else value.to(parameter.device)
