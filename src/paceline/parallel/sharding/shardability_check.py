"""Whether an update rule is right on a part of what it moves: tried, not read off its name.

A copy of the rule takes a few steps on a random tensor and on its two halves, and on one alone and beside another.
A rule that acts otherwise only after more steps, or only on larger tensors, is not found by this.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import JobError
from paceline.torch_internals.dispatch_modes import hide_from_modes

FIELDS = ("state", "param_groups")
_SMALL = (7, 5, 3, 2, 2)
_LARGE = ((301,), (161, 143), (137, 12, 11), (137, 11, 4, 3))  # some rules leave small matrices to another one
_SCALES = (*(1.0,) * 8, 1e-4, 1e4, 1.0, 1e4)  # of the gradients, step by step: what is clipped has to be large
_BARE = 5  # the step at which one half has no gradient
_FEW = 10_000
_RATE = 1e-3  # at least: a rate of 0 that a schedule raises later would hide the rule


def merge_equal_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Its groups with parameters, where those that differ in their rate or name alone are one."""
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        own = ("params", "param_names", "lr", "initial_lr", "name")
        one = found.setdefault(repr([*((k, v) for k, v in group.items() if k not in own)]), {**group, "params": []})
        one["params"].extend(group["params"])
    return [group for group in found.values() if group["params"]]


def shardability_error(optimizer: Optimizer, group: Mapping[str, Any], *, exact: bool, dim: int) -> str:
    """Empty where what is cut along `dim` may be updated alone; otherwise what was seen."""
    kind = type(optimizer).__name__
    for shape in (shape for dims in sorted({p.dim() for p in group["params"] if p.dim()}) for shape in _shapes(dims)):
        whole, gradients = _drawn(shape, exact)
        sizes = [(whole.shape[dim] + 1) // 2, whole.shape[dim] // 2]
        starts, steps = whole.split(sizes, dim), [g.split(sizes, dim) for g in gradients]
        steps[_BARE][1].zero_()
        try:
            alone = _stepped(optimizer, group, [whole], [[g] for g in gradients])[0]
            halves = [_stepped(optimizer, group, [starts[n]], [[g[n]] for g in steps])[0] for n in (0, 1)]
        except Exception as error:
            return f"{kind} could not be tried on a small matrix ({type(error).__name__}: {error})"
        if not _same(alone, torch.cat(halves, dim if dim < 0 else dim + 1), exact):
            rows = "bits" if exact else "values"
            return f"{kind} gives other {rows} on the two halves of a matrix than on the whole"
    return ""


def refuse_across(optimizer: Optimizer) -> None:
    """For layouts in which it may have some of its parameters.

    Raises:
        JobError: it looks at several at once.
    """
    for group in merge_equal_groups(optimizer):
        shape = _shapes(max(p.dim() for p in group["params"]))[0]
        (one, first), (two, second) = _drawn(shape, False), _drawn(shape, False, seed=1)
        try:
            both = _stepped(optimizer, group, [one, two], [[a, b] for a, b in zip(first, second, strict=True)])
            apart = [_stepped(optimizer, group, [s], [[g] for g in gs])[0] for s, gs in ((one, first), (two, second))]
        except Exception:
            return  # the other try names it
        if not all(_same(here, alone, False) for here, alone in zip(both, apart, strict=True)):
            raise JobError(
                f"{type(optimizer).__name__} moves a parameter otherwise beside a second one than alone.",
                cause="it looks at several parameters at once, or draws random numbers",
                hint="--layout ddp, where every rank has all of them",
            )


def refuse_unmoved(optimizer: Optimizer) -> None:
    """For layouts in which it steps on other tensors than the factory was given.

    Raises:
        JobError: it does not move what its groups hold.
    """
    groups = merge_equal_groups(optimizer)
    for group in groups:
        start, gradients = _drawn(_shapes(max(p.dim() for p in group["params"]))[0], False)
        try:
            way = _stepped(optimizer, group, [start], [[g] for g in gradients])[0]
        except Exception:
            return  # the other try names it
        if not torch.equal(way[-1], start):
            return
    if groups:
        raise JobError(
            f"{type(optimizer).__name__} does not move the parameters in its param_groups.",
            cause=f"{len(_SCALES)} steps left them as they were: it moves others, which it holds elsewhere",
            hint="read self.param_groups in step(), or --layout ddp",
        )


def takes_nothing(optimizer: Optimizer) -> bool:
    """Whether it steps on a tensor without elements, as a rank has of what others hold, where it does on one alone."""
    for group in merge_equal_groups(optimizer):
        some = torch.zeros(_shapes(max(p.dim() for p in group["params"]))[0])
        none = some[:0] if some.dim() else some.new_zeros(0)  # a scalar is another rank's: this one has an empty vector
        for start in (some, none):
            try:
                _stepped(optimizer, group, [start], [[start]])
            except Exception:
                return start is some  # one alone is not what it is made for: nothing is known
    return True


def built_again(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """One that makes its state at once is made anew, with the same defaults, where its tensors are."""
    kind = type(optimizer)
    plain = [{k: v for k, v in group.items() if k != "param_names"} for group in groups]
    try:
        made = kind(plain, **optimizer.defaults)
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(
            f"{kind.__name__} makes its state when it is built, and can't be built again from its defaults: {error}",
            cause="its state must lie beside each rank's own rows",
            hint="make the state in step(), as torch's own optimizers do",
        ) from error
    made.param_groups[:] = list(groups)
    return made


def _shapes(dims: int) -> list[tuple[int, ...]]:
    small = _SMALL[:dims] if dims <= len(_SMALL) else (_SMALL[0], *(2,) * (dims - 1))
    return [small, *_LARGE[max(dims, 1) - 1 : dims]]


def _drawn(shape: Sequence[int], exact: bool, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A tensor and its gradients; a large one has the last few."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if exact else torch.float64
    start, drawn = (torch.randn(tuple(shape), generator=generator).to(dtype) for _ in range(2))
    scales = _SCALES if start.numel() < _FEW else _SCALES[-_BARE - 1 :]
    return start, [drawn.roll(step) * scale for step, scale in enumerate(scales)]


def _stepped(
    optimizer: Optimizer, group: Mapping[str, Any], starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Where a copy of the rule takes the tensors: for each, one after every step."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    options = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    if isinstance(options.get("lr"), int | float | Tensor) and abs(options["lr"]) < _RATE:
        options["lr"] = options["lr"] * 0 + _RATE
    ways: list[list[Tensor]] = [[] for _ in starts]
    with hide_from_modes(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probe = _copied(optimizer, {**options, "params": parameters})
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            type(probe).step(probe)  # a schedule's wrap, on the optimizer itself, would step the original
            for way, parameter in zip(ways, parameters, strict=True):
                way.append(parameter.detach().clone())
    return [torch.stack(way) for way in ways]


def _copied(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """With groups and state of its own, which an optimizer inside it that shared them goes on to share."""
    if optimizer.state:
        return built_again(optimizer, [group])
    probe = object.__new__(type(optimizer))
    groups, state = [group], defaultdict[Any, Any](dict)
    own = {k: v for k, v in vars(optimizer).items() if k not in (*FIELDS, "step")}
    own = copy.deepcopy(own, {id(optimizer.param_groups): groups, id(optimizer.state): state})
    vars(probe).update({**own, "param_groups": groups, "state": state})
    return probe


def _same(one: Tensor, other: Tensor, exact: bool) -> bool:
    """What is not finite in both says nothing: the gradients may be too large for the rule."""
    if torch.equal(one, other):
        return True
    one, other = one.nan_to_num(), other.nan_to_num()
    return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-9, atol=1e-12)
