"""The optimizers' state by name: tensors that follow their parameter are cut as it is, the rest is written once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.place.holding import Holding
from paceline.place.parts import Part
from paceline.place.units import Named
from paceline.store.pieces import Stored
from paceline.store.tensors import Writable
from paceline.train.convert import from_bytes, to_bytes
from paceline.train.options import KERNELS
from paceline.train.plain import from_plain, to_plain, without_anew
from paceline.train.slices import own_pieces, read_part, speaker
from paceline.train.together import merged
from paceline.world import World


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What the optimizers of all ranks hold: `named` are this rank's parameters, `kept` says which part each is."""

    named: Sequence[Named]
    kept: Holding
    world: World

    @property
    def names(self) -> dict[int, str]:
        """Name by `id(parameter)`."""
        return {id(member.parameter): member.name for member in self.named}

    def part(self, name: str) -> Part:
        """This rank's part of a parameter."""
        return self.kept.parts(name)[self.world.rank]

    def together(self, names: Sequence[Sequence[str]]) -> list[str]:
        """What the ranks name, each once, in the model's order."""
        found = {name for each in names for name in each}
        return [name for name in self.kept.names if name in found]


def group_names(optimizers: Sequence[Optimizer], shares: Shares) -> list[list[list[str]]]:
    """For each optimizer, for each group, the parameters in it over all ranks. Every rank calls this."""
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
    """The tensors that this rank writes, and its scalars as JSON: for each optimizer, by name.

    Raises:
        CheckpointError: a state can't be cut as its parameter is.
    """
    tensors: list[Writable] = []
    scalars: list[dict[str, Any]] = []
    names = shares.names
    for index, optimizer in enumerate(optimizers):
        scalars.append({})
        for parameter, state in optimizer.state.items():
            name = names[id(parameter)]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors += _own(f"{index}/{name}/{key}", value, name, parameter, shares, type(optimizer).__name__)
                elif speaker(shares.kept.parts(name)) == shares.world.rank:
                    plain = to_plain(value, where=type(optimizer).__name__)
                    scalars[-1].setdefault(name, {})[key] = plain
    return tensors, scalars


def _own(key: str, value: Tensor, name: str, parameter: Tensor, shares: Shares, optimizer: str) -> list[Writable]:
    parts, rank = shares.kept.parts(name), shares.world.rank
    if value.shape == parameter.shape:
        return own_pieces(key, dtype=value.dtype, find=partial(Tensor.detach, value), parts=parts, rank=rank)
    if not parts[rank].is_all and parts[rank].boxes and value.numel() > 1:
        raise CheckpointError(
            f"the state {key.rpartition('/')[2]} of {optimizer} for {name} can't be saved: it has the shape "
            f"{list(value.shape)}, and this rank holds a part of the parameter.",
            cause="an optimizer that looks at whole tensors was given a part of one",
            hint="a layout that keeps parameters whole: ddp",
        )
    return [to_bytes(key, value)] if speaker(parts) == rank else []


def plains(
    optimizers: Sequence[Optimizer], shares: Shares, scalars: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What a checkpoint says of each optimizer beside its tensors. Every rank calls this."""
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
        all_scalars = merged(each[index] for each in told)
        found.append({"kind": type(optimizer).__name__, "scalars": all_scalars, "groups": said})
    return found


def load_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], *, kept: Sequence[Collection[str]]) -> None:
    """The saved options of each group, without those in `kept`; what can't be written stays as the job makes it."""
    for group, saved, own in zip(optimizer.param_groups, groups, kept, strict=True):
        for key, value in from_plain(without_anew(saved["options"])).items():
            if key not in KERNELS and key not in own:
                group[key] = _beside(value, group.get(key))


def _beside(value: Any, present: Any) -> Any:
    """A tensor goes where the present one is: an optimizer that is captured has its rate on the device."""
    return value.to(present.device) if isinstance(value, Tensor) and isinstance(present, Tensor) else value


def load_state(optimizer: Optimizer, plain: Mapping[str, Any], stored: Stored, *, shares: Shares, prefix: str) -> None:
    """Give each parameter of this rank its state, cut as the parameter is here.

    Where a rank has nothing of a parameter there is nothing to remember.

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
                state = from_plain(plain["scalars"].get(name, {}))
                state |= {key.rpartition("/")[2]: _loaded(stored, key, part) for key in keys.get(name, [])}
                optimizer.state[parameter] = {k: _placed(k, v, parameter) for k, v in state.items()}


def _loaded(stored: Stored, key: str, part: Part) -> Tensor:
    if stored.shape(key) == part.shape:
        return read_part(stored, key, part=part)
    return from_bytes(stored[key])


def _placed(key: str, value: Any, parameter: nn.Parameter) -> Any:
    """State lives beside its parameter; a step count stays where the optimizer keeps it."""
    if not isinstance(value, Tensor) or key == "step":
        return value
    return value.to(parameter.device)
