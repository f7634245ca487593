"""Build the job's optimizer on row shards, with the parameter groups of the full model.

An elementwise update rule is correct on any shard. `shardability_check` tests by experiment whether a rule is correct
on shards.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import JobError, LayoutError
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.sharding.shardability_check import (
    OPTIMIZER_FIELDS,
    accepts_empty_tensor,
    merge_equal_groups,
    rebuild_optimizer,
    refuse_ignored_groups,
    refuse_optimizer_combining_parameters,
    shardability_error,
)

Pairs = list[tuple[str, nn.Parameter]]
"""Parameters with their names, as the job's optimizer factory gets them."""


def make_meta_parameters(named_parameters: Sequence[NamedParameter]) -> Pairs:
    """Return the full model's parameters as meta tensors, for the job's optimizer factory."""
    return [
        (m.name, nn.Parameter(torch.empty(m.parameter.shape, dtype=m.parameter.dtype, device="meta")))
        for m in named_parameters
    ]


@dataclass(frozen=True, kw_only=True)
class ShardedOptimizerFactory:
    """A factory of this rank's optimizers, from the `optimizers` that the job's factory has created.

    `pairs` are the names and the parameters of the full model on the meta device, which these optimizers contain.
    """

    pairs: Pairs
    optimizers: Sequence[Optimizer]

    def full_tensor_reasons(self, *, exact: bool = False) -> dict[str, str]:
        """Return the names of the parameters whose update rule needs full tensors, each with the reason.

        Raises:
            JobError: a rule combines several parameters, so it would be wrong on shards.
        """
        names = {id(p): name for name, p in self.pairs}
        reasons: dict[str, str] = {}
        for optimizer in self.optimizers:
            refuse_optimizer_combining_parameters(optimizer)
            for group in merge_equal_groups(optimizer):
                reason = shardability_error(optimizer, group, exact=exact, dim=0)
                if reason:
                    reasons |= {names[id(p)]: reason for p in group["params"] if p.dim()}
        return reasons

    def refuse_rows(self, *, layout: str, exact: bool = False) -> None:
        """Refuse update rules that need full tensors, for layouts that shard every parameter by rows.

        Raises:
            LayoutError: a rule is not correct on rows; the message names it.
        """
        reasons = self.full_tensor_reasons(exact=exact)
        for name, reason in reasons.items():
            raise LayoutError(
                f"{reason}, and {layout} shards {name} by rows.",
                cause="the update rule needs a whole tensor",
                hint=f"--layout zero1 or zero2, which assign each such parameter to one rank; or "
                f"torch.optim.AdamW{' without fused=True' if exact else ''}",
            )

    def refuse_optimizers_combining_parameters(self) -> None:
        """Refuse optimizers that combine parameters, for layouts in which a rank's optimizer has only some of them.

        Raises:
            JobError: a rule combines several parameters.
        """
        for optimizer in self.optimizers:
            refuse_optimizer_combining_parameters(optimizer)

    def refuse_slices(self, split_names: Collection[str], *, layout: str, exact: bool = False) -> None:
        """Refuse update rules that are wrong on slices of the parameters in `split_names`.

        The rules are tried on slices along the first and along the last dimension. With `exact`, bits must be equal.

        Raises:
            LayoutError: a rule is not correct on slices; the message names it.
        """
        names = {id(p): name for name, p in self.pairs}
        for optimizer in self.optimizers:
            for group in merge_equal_groups(optimizer):
                split_parameters = [p for p in group["params"] if names[id(p)] in split_names and p.dim()]
                if any(
                    shardability_error(optimizer, {**group, "params": split_parameters}, exact=exact, dim=dim)
                    for dim in (0, -1)
                ):
                    first = max(split_parameters, key=Tensor.dim)
                    kind = "matrices" if first.dim() > 1 else "vectors"
                    raise LayoutError(
                        f"{type(optimizer).__name__} needs whole {kind}, and {layout} leaves pieces of "
                        f"{names[id(first)]}.",
                        cause=f"its step on a piece {'has other bits than' if exact else 'differs from'} its step on "
                        "the whole",
                        hint="--layout ddp, zero1, zero2 or pp, where a matrix stays whole; or torch.optim.AdamW"
                        f"{' without fused=True' if exact else ''}",
                    )

    def make_optimizers(self, row_shards: Sequence[NamedParameter]) -> list[Optimizer]:
        """Return the optimizers over the row shards, with the same groups and options.

        Parameters without a row shard are left out. Empty row shards are left out if the rule fails on empty tensors.
        Call this only once, because it may change the optimizers in place.
        """
        local_parameters = {row_shard.name: row_shard.parameter for row_shard in row_shards}
        names = {id(p): name for name, p in self.pairs}
        return [_replace_parameters(optimizer, local_parameters, names) for optimizer in self.optimizers]


def try_optimizer_factory(
    factory: Callable[[Pairs], Any], named_parameters: Sequence[NamedParameter]
) -> ShardedOptimizerFactory:
    """Call the job's optimizer factory once, on meta tensors.

    Raises:
        JobError: the factory reads values, hooks an optimizer's step, or its optimizer updates other tensors.
    """
    pairs = make_meta_parameters(named_parameters)
    try:
        result = factory(pairs)
    except (NotImplementedError, RuntimeError) as error:
        raise JobError(
            f"optimizer= failed on parameters without memory: {error}",
            cause="it reads their values; a sharded layout derives groups from names and shapes only",
            hint="optimizer=lambda named: torch.optim.AdamW([p for _, p in named])",
        ) from error
    optimizers = list(result) if isinstance(result, list | tuple) else [result]
    for optimizer in optimizers:
        if isinstance(optimizer, Optimizer):
            _refuse_hooked(optimizer)
            refuse_ignored_groups(optimizer)
    return ShardedOptimizerFactory(pairs=pairs, optimizers=optimizers)


def _replace_parameters(
    optimizer: Optimizer, local_parameters: Mapping[str, nn.Parameter], names: Mapping[int, str]
) -> Optimizer:
    """Return the optimizer with the row shards instead of its parameters.

    If the optimizer has no state yet, it is changed in place. If it already has state, that state belongs to the full
    parameters, so a new optimizer is built.
    """
    empty_names = [name for name, row_shard in local_parameters.items() if not row_shard.numel()]
    if empty_names and not accepts_empty_tensor(optimizer):
        local_parameters = {name: row_shard for name, row_shard in local_parameters.items() if row_shard.numel()}
    groups = [_make_group(group, local_parameters, names) for group in optimizer.param_groups]
    if optimizer.state:
        return rebuild_optimizer(optimizer, groups)
    _refuse_parameter_references(optimizer, names)
    optimizer.param_groups[:] = groups
    return optimizer


def _make_group(
    group: Mapping[str, Any], local_parameters: Mapping[str, nn.Parameter], names: Mapping[int, str]
) -> dict[str, Any]:
    local_names = [names[id(p)] for p in group["params"] if names[id(p)] in local_parameters]
    new_group = {**group, "params": [local_parameters[name] for name in local_names]}
    if "param_names" in group:
        new_group["param_names"] = local_names
    return new_group


def _refuse_hooked(optimizer: Optimizer) -> None:
    """Raise JobError if the job's factory has hooked or replaced the optimizer's `step`."""
    attributes = vars(optimizer)
    hooks = [h for when in ("pre", "post") for h in attributes.get(f"_optimizer_step_{when}_hooks", {}).values()]
    step = attributes.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # an LR scheduler's wrapper only counts steps
        hooks.append(step)
    for hook in hooks:
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise JobError(
            f"optimizer= hooked {name} into the step of {type(optimizer).__name__}.",
            cause="it may hold the factory's parameters, but this layout steps other tensors, or parts of them",
            hint="--train.max_grad_norm 1.0 if it clips; or --layout ddp, which steps the model's own parameters",
        )


def _refuse_parameter_references(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Raise JobError if another attribute than `param_groups` holds parameters of the job's factory."""
    for field, value in vars(optimizer).items():
        referenced = value.param_groups if isinstance(value, Optimizer) else value
        if field in OPTIMIZER_FIELDS or referenced is optimizer.param_groups:
            continue
        if any(id(tensor) in names or tensor.is_meta for tensor in _tensors(referenced)):
            raise JobError(
                f"{type(optimizer).__name__}.{field} holds parameters of its own.",
                cause="each rank steps on its own rows, but this attribute still refers to the tensors of optimizer=",
                hint="read self.param_groups in step(), or --layout ddp",
            )


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, also in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for key, item in value.items() for t in (*_tensors(key), *_tensors(item))]
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple | set) else []
