"""What a run is between two steps: everything a checkpoint holds, and nothing that can be derived."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError, JobError
from paceline.job import Job
from paceline.place.exact import Grid
from paceline.place.views import write
from paceline.step.update import Ema, Update
from paceline.store.checkpoints import Loaded
from paceline.store.tensors import TensorBytes
from paceline.train.apart import Unlisted, extra_state, load_extra_state, tensors_of
from paceline.train.convert import first_names, from_bytes, once, structure, to_bytes
from paceline.train.options import KERNELS, Options, kept_now, replay
from paceline.train.plain import from_plain, to_plain, without_anew

MODEL, OPTIMIZER, EMA = "model.safetensors", "optimizer.safetensors", "ema.safetensors"
BUFFERS = "buffers.safetensors"


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
    """That `optimizer=` gave optimizers, and each of these parameters is in exactly one group.

    Raises:
        JobError: a parameter is missing, twice there, or not the model's.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(
                f"optimizer= gave a {type(optimizer).__name__}, expected a torch.optim.Optimizer.",
                hint="optimizer=lambda named: torch.optim.AdamW([p for _, p in named])",
            )
    _check_groups(optimizers, names)


def files_of(
    *, model: nn.Module, update: Update, unlisted: Unlisted
) -> tuple[dict[str, list[TensorBytes]], dict[str, Any]]:
    """The tensors of a checkpoint by file, and the JSON that goes with them."""
    weights, aliases = once(tensors_of(model))
    tensors, optimizers = _optimizer_state(update.optimizers, _names(model))
    files = {MODEL: weights, OPTIMIZER: tensors}
    buffers = unlisted.changed()
    if buffers:
        files[BUFFERS] = buffers
    if update.ema is not None:
        pairs = zip(update.ema.names, update.ema.averages, strict=True)
        files[EMA] = [to_bytes(name, tensor) for name, tensor in pairs]
    scaler = None if update.scaler is None else to_plain(update.scaler.state_dict(), where="the loss scaler")
    schedules = [to_plain(s.state_dict(), where=type(s).__name__) for s in update.schedules]
    return files, {
        "aliases": aliases,
        "optimizers": optimizers,
        "schedules": [without_anew(s) for s in schedules],
        "scaler": scaler,
        "extra_state": extra_state(model),
    }


def load_model(loaded: Loaded, model: nn.Module, *, unlisted: Unlisted) -> None:
    """Copy a checkpoint's weights and buffers into the model, in place, so that ties and aliases stay.

    Raises:
        CheckpointError: it is another model's.
    """
    stored = loaded.files.get(MODEL, {})
    aliases: Mapping[str, str] = loaded.state.get("aliases", {})
    targets = tensors_of(model)
    tensors = {
        name: from_bytes(stored[aliases.get(name, name)]) for name in targets if aliases.get(name, name) in stored
    }
    wanted, found = structure(targets), {**structure(tensors), **{n: "" for n in stored if n not in targets}}
    differing = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{loaded.path.name} is another model's: {first_names(differing)} differ.",
            where=str(loaded.path),
            cause=f"{name} is {found.get(name) or 'absent'} there and {wanted.get(name) or 'absent'} here",
            hint="the same --job.* settings as when it was saved",
        )
    with torch.no_grad():
        for name, target in targets.items():
            write(target, tensors[name])
    unlisted.restore(loaded.files.get(BUFFERS, {}))
    load_extra_state(model, loaded.state.get("extra_state", {}))


def load_update(loaded: Loaded, *, model: nn.Module, update: Update, given: Options) -> None:
    """Give optimizers, schedules, scaler and average their state back.

    `given` are the options that the job gives now; where the checkpoint's run began with others, these hold.
    """
    state = loaded.state
    for kind, now in (("optimizers", update.optimizers), ("schedules", update.schedules)):
        if len(state[kind]) != len(now):
            raise CheckpointError(
                f"the checkpoint holds {len(state[kind])} {kind}, the job makes {len(now)}.",
                where=str(loaded.path),
                cause="optimizer= or lr_schedule= of the job was changed, added or taken out since",
                hint="the job as it was, or start anew with another --run-dir",
            )
    began = [saved.get("options") for saved in state.get("identity", {}).get("optimizer", [])]
    for index, (optimizer, plain) in enumerate(zip(update.optimizers, state["optimizers"], strict=True)):
        then = began[index] if index < len(began) else None
        changed = then is not None and then != given[index]
        for schedule in update.schedules[index : index + 1]:
            _load_schedule(schedule, state["schedules"][index], steps=loaded.step if changed else None)
        if plain["kind"] == type(optimizer).__name__:
            _load_options(optimizer, plain["groups"], then=then if changed else None, now=given[index])
            _load_optimizer(optimizer, plain, loaded.files.get(OPTIMIZER, {}), _names(model), prefix=f"{index}/")
    if update.scaler is not None and state.get("scaler"):
        update.scaler.load_state_dict(from_plain(state["scaler"]))
    if update.ema is not None:
        load_ema(loaded, update.ema)


def load_ema(loaded: Loaded, ema: Ema) -> None:
    """Give the average its values back; one that the checkpoint does not have begins at the weights, loaded before."""
    stored = loaded.files.get(EMA, {})
    with torch.no_grad():
        for name, average, live in zip(ema.names, ema.averages, ema.live, strict=True):
            average.copy_(from_bytes(stored[name]) if name in stored else live)


def grid_state(grid: Grid | None) -> dict[str, int | None]:
    """The exact sum's grid by FQN."""
    return {} if grid is None else dict(zip(grid.names, grid.exponents, strict=True))


def load_grid(grid: Grid | None, state: Mapping[str, int | None]) -> None:
    """Take the grid back."""
    if grid is not None:
        grid.exponents = [state.get(name) for name in grid.names]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


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
            f"{first_names(twice)} stand in two groups" if twice else "",
            f"{len(foreign)} parameters in its groups are not trainable ones of this model" if foreign else "",
        ]
        raise JobError(
            f"optimizer=: {'; '.join(part for part in parts if part)}.",
            cause="every trainable parameter belongs in exactly one group",
            hint="build the groups from the (name, parameter) pairs that the factory is given",
        )


def _optimizer_state(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> tuple[list[TensorBytes], list[dict[str, Any]]]:
    tensors: list[TensorBytes] = []
    plains = []
    for index, optimizer in enumerate(optimizers):
        scalars: dict[str, dict[str, Any]] = {}
        for parameter, state in optimizer.state.items():
            name = names[id(parameter)]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors.append(to_bytes(f"{index}/{name}/{key}", value))
                else:
                    scalars.setdefault(name, {})[key] = to_plain(value, where=type(optimizer).__name__)
        groups = [
            {
                "names": [names[id(p)] for p in group["params"]],
                "options": to_plain({k: v for k, v in group.items() if k != "params"}, where="a parameter group"),
            }
            for group in optimizer.param_groups
        ]
        plains.append({"kind": type(optimizer).__name__, "scalars": scalars, "groups": groups})
    return tensors, plains


def _load_schedule(schedule: Any, plain: Any, *, steps: int | None) -> None:
    """Its state, or, where it moves options that were changed, its way from the beginning."""
    if steps is not None:
        replay(schedule, steps=steps)
        return
    schedule.load_state_dict({**schedule.state_dict(), **from_plain(plain)})


def _load_options(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    *,
    then: Sequence[Mapping[str, Any]] | None,
    now: Sequence[Mapping[str, Any]],
) -> None:
    """The saved options of each group, without those that the job has changed since."""
    if len(groups) != len(optimizer.param_groups):
        return  # accepted by the user: other groups are the job's own
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        kept = kept_now(group, then=then[index], now=now[index]) if then is not None else set()
        found = without_none(from_plain(saved["options"]), group)
        group.update({key: value for key, value in found.items() if key not in {*kept, *KERNELS}})


def _load_optimizer(
    optimizer: Optimizer,
    plain: Mapping[str, Any],
    stored: Mapping[str, TensorBytes],
    names: Mapping[int, str],
    *,
    prefix: str,
) -> None:
    by_name: dict[str, dict[str, Any]] = {n: from_plain(s) for n, s in plain["scalars"].items()}
    for key, value in stored.items():
        if key.startswith(prefix):
            name, _, part = key.removeprefix(prefix).rpartition("/")
            by_name.setdefault(name, {})[part] = from_bytes(value)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = by_name.get(names[id(parameter)])
            if state is not None:
                optimizer.state[parameter] = {k: _placed(k, v, parameter) for k, v in state.items()}


def without_none(options: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Saved options, where a value that was made anew keeps its present one."""
    return {key: current.get(key) if value is None else value for key, value in options.items()}


def _placed(key: str, value: Any, parameter: nn.Parameter) -> Any:
    """State lives beside its parameter; a step count stays where the optimizer keeps it."""
    if not isinstance(value, Tensor) or key == "step":
        return value
    return value.to(parameter.device)
