"""Check by experiment that an optimizer's update rule is correct on a shard of its parameters.

Most of torch's own optimizers update each element by itself, so they are not tried, which saves time at each restart. A
copy of the optimizer makes a few steps on a random tensor, and then on the two halves of the tensor. Another test
compares steps on one tensor with steps on two tensors together. The check does not detect a rule that differs only
after more steps, or only on larger tensors.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from paceline.errors import JobError
from paceline.torch_internals.dispatch_modes import hide_from_modes
from paceline.torch_internals.private_api import has_global_optimizer_hooks

OPTIMIZER_FIELDS = ("state", "param_groups")
_SMALL_SHAPE = (7, 5, 3, 2, 2)
_LARGE_SHAPES = ((301,), (161, 143), (137, 12, 11), (137, 11, 4, 3))  # some rules differ for small matrices
_GRADIENT_SCALES = (*(1.0,) * 8, 1e-4, 1e4, 1.0, 1e4)  # one for each step; the large scales detect clipping
_ZERO_GRADIENT_STEP = 5  # the step in which one half has a zero gradient
_SMALL_NUMEL = 10_000
ELEMENTWISE = frozenset(
    {
        optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
        optim.RMSprop, optim.Rprop, optim.SGD,
    }
)  # fmt: skip
"""Optimizers of torch that update each element from its own gradient and state. Subclasses may do something else."""
_MIN_LR = 1e-3  # a learning rate of 0, which a schedule raises later, would hide all differences


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the rule is known to update each element by itself. Hooks of all optimizers may change that."""
    return type(optimizer) in ELEMENTWISE and not has_global_optimizer_hooks()


def merge_equal_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the optimizer's non-empty groups, and merge groups that differ only in learning rate or name."""
    merged: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        ignored_keys = ("params", "param_names", "lr", "initial_lr", "name")
        group_of_key = merged.setdefault(
            repr([*((k, v) for k, v in group.items() if k not in ignored_keys)]), {**group, "params": []}
        )
        group_of_key["params"].extend(group["params"])
    return [group for group in merged.values() if group["params"]]


def shardability_error(optimizer: Optimizer, group: Mapping[str, Any], *, exact: bool, dim: int) -> str:
    """Return the reason why the update rule is wrong on tensors that are split along `dim`; empty if it is correct.

    With `exact`, the results on the two halves must be bitwise equal to the result on the whole tensor.
    """
    return "" if _is_elementwise(optimizer) and not exact else _trial_error(optimizer, group, exact=exact, dim=dim)


def _trial_error(optimizer: Optimizer, group: Mapping[str, Any], *, exact: bool, dim: int) -> str:
    kind = type(optimizer).__name__
    for shape in (
        shape for dims in sorted({p.dim() for p in group["params"] if p.dim()}) for shape in _trial_shapes(dims)
    ):
        full_tensor, gradients = _make_trial(shape, exact)
        sizes = [(full_tensor.shape[dim] + 1) // 2, full_tensor.shape[dim] // 2]
        halves, half_gradients = full_tensor.split(sizes, dim), [g.split(sizes, dim) for g in gradients]
        half_gradients[_ZERO_GRADIENT_STEP][1].zero_()
        try:
            full_result = _run_steps(optimizer, group, [full_tensor], [[g] for g in gradients])[0]
            half_results = [
                _run_steps(optimizer, group, [halves[half]], [[pair[half]] for pair in half_gradients])[0]
                for half in (0, 1)
            ]
        except Exception as error:
            return f"{kind} could not be tried on a small matrix ({type(error).__name__}: {error})"
        if not _results_agree(full_result, torch.cat(half_results, dim if dim < 0 else dim + 1), exact):
            difference = "bits" if exact else "values"
            return f"{kind} gives different {difference} on the two halves of a matrix than on the whole"
    return ""


def refuse_optimizer_combining_parameters(optimizer: Optimizer) -> None:
    """Refuse a rule that combines several parameters, for layouts in which a rank has only some of them.

    Raises:
        JobError: the rule updates a parameter differently if the optimizer has a second one.
    """
    if not _is_elementwise(optimizer):
        _try_two_parameters(optimizer)


def _try_two_parameters(optimizer: Optimizer) -> None:
    for group in merge_equal_groups(optimizer):
        shape = _trial_shapes(max(p.dim() for p in group["params"]))[0]
        first_start, first_gradients = _make_trial(shape, False)
        second_start, second_gradients = _make_trial(shape, False, seed=1)
        try:
            joint_results = _run_steps(
                optimizer,
                group,
                [first_start, second_start],
                [[a, b] for a, b in zip(first_gradients, second_gradients, strict=True)],
            )
            separate_results = [
                _run_steps(optimizer, group, [start], [[gradient] for gradient in gradients])[0]
                for start, gradients in ((first_start, first_gradients), (second_start, second_gradients))
            ]
        except Exception:
            return  # `shardability_error` reports it
        if not all(
            _results_agree(joint, separate, False)
            for joint, separate in zip(joint_results, separate_results, strict=True)
        ):
            raise JobError(
                f"{type(optimizer).__name__} updates a parameter differently if it also updates a second parameter.",
                cause="it combines several parameters, or draws random numbers",
                hint="--layout ddp, where every rank has all of them",
            )


def refuse_ignored_groups(optimizer: Optimizer) -> None:
    """Refuse an optimizer that ignores its groups, for layouts that replace the parameters passed to the factory.

    Raises:
        JobError: the optimizer does not update the parameters in its groups.
    """
    groups = [] if _is_elementwise(optimizer) else merge_equal_groups(optimizer)
    for group in groups:
        start, gradients = _make_trial(_trial_shapes(max(p.dim() for p in group["params"]))[0], False)
        try:
            values = _run_steps(optimizer, group, [start], [[g] for g in gradients])[0]
        except Exception:
            return  # `shardability_error` reports it
        if not torch.equal(values[-1], start):
            return
    if groups:
        raise JobError(
            f"{type(optimizer).__name__} does not update the parameters in its param_groups.",
            cause=f"{len(_GRADIENT_SCALES)} steps did not change them: it updates tensors that it stores elsewhere",
            hint="read self.param_groups in step(), or --layout ddp",
        )


def accepts_empty_tensor(optimizer: Optimizer) -> bool:
    """Return whether the optimizer can step on an empty tensor.

    If its step fails on a small tensor with elements too, emptiness is not the reason, and the result is True.
    """
    for group in merge_equal_groups(optimizer):
        non_empty = torch.zeros(_trial_shapes(max(p.dim() for p in group["params"]))[0])
        # a scalar that another rank owns is an empty vector on this one
        empty = non_empty[:0] if non_empty.dim() else non_empty.new_zeros(0)
        for start in (non_empty, empty):
            try:
                _run_steps(optimizer, group, [start], [[start]])
            except Exception:
                return start is non_empty  # then even a non-empty tensor fails, so emptiness is not the reason
    return True


def rebuild_optimizer(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Return a new optimizer on `groups` with the same defaults, so that it creates its state for these tensors."""
    optimizer_class = type(optimizer)
    unnamed_groups = [{k: v for k, v in group.items() if k != "param_names"} for group in groups]
    try:
        rebuilt = optimizer_class(unnamed_groups, **optimizer.defaults)
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(
            f"{optimizer_class.__name__} creates its state when it is built, and can't be rebuilt from its defaults: "
            f"{error}",
            cause="its state must be sharded like each rank's rows",
            hint="create the state in step(), as torch's own optimizers do",
        ) from error
    rebuilt.param_groups[:] = list(groups)
    return rebuilt


def _trial_shapes(dims: int) -> list[tuple[int, ...]]:
    small_shape = _SMALL_SHAPE[:dims] if dims <= len(_SMALL_SHAPE) else (_SMALL_SHAPE[0], *(2,) * (dims - 1))
    return [small_shape, *_LARGE_SHAPES[max(dims, 1) - 1 : dims]]


def _make_trial(shape: Sequence[int], exact: bool, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Return a random tensor and its gradients, one per step; a large tensor gets fewer steps."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if exact else torch.float64
    start, gradient = (torch.randn(tuple(shape), generator=generator).to(dtype) for _ in range(2))
    scales = _GRADIENT_SCALES if start.numel() < _SMALL_NUMEL else _GRADIENT_SCALES[-_ZERO_GRADIENT_STEP - 1 :]
    return start, [gradient.roll(step) * scale for step, scale in enumerate(scales)]


def _run_steps(
    optimizer: Optimizer, group: Mapping[str, Any], starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Step a copy of the optimizer on `starts`; return for each tensor its values after every step, stacked."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    options = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    if isinstance(options.get("lr"), int | float | Tensor) and abs(options["lr"]) < _MIN_LR:
        options["lr"] = options["lr"] * 0 + _MIN_LR
    histories: list[list[Tensor]] = [[] for _ in starts]
    with hide_from_modes(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes a millisecond, and seeds GPUs too
        optimizer_copy = _copy_optimizer(optimizer, {**options, "params": parameters})
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            # The `step` of an instance may be a scheduler's wrapper, which would step the original optimizer.
            type(optimizer_copy).step(optimizer_copy)
            for history, parameter in zip(histories, parameters, strict=True):
                history.append(parameter.detach().clone())
    return [torch.stack(history) for history in histories]


def _copy_optimizer(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Return a copy with separate groups and state.

    If the optimizer shares them with an inner optimizer, the copy shares its groups and state with the inner copy.
    """
    if optimizer.state:
        return rebuild_optimizer(optimizer, [group])
    optimizer_copy = object.__new__(type(optimizer))
    groups, state = [group], defaultdict[Any, Any](dict)
    attributes = {k: v for k, v in vars(optimizer).items() if k not in (*OPTIMIZER_FIELDS, "step")}
    attributes = copy.deepcopy(attributes, {id(optimizer.param_groups): groups, id(optimizer.state): state})
    vars(optimizer_copy).update({**attributes, "param_groups": groups, "state": state})
    return optimizer_copy


def _results_agree(first: Tensor, second: Tensor, exact: bool) -> bool:
    """Return whether two results agree, bit by bit if `exact`. NaN agrees with NaN: large gradients may overflow."""
    if torch.equal(first, second):
        return True
    first, second = first.nan_to_num(), second.nan_to_num()
    return torch.equal(first, second) if exact else torch.allclose(first, second, rtol=1e-9, atol=1e-12)
