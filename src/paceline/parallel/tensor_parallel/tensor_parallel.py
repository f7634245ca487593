"""Shard a model over tensor-parallel ranks; its modules and parameter names do not change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.tensor_parallel.collectives import (
    TensorParallelGroup,
    WorldGroup,
    local_piece,
)
from paceline.parallel.tensor_parallel.local_modules import register_local_hooks
from paceline.parallel.tensor_parallel.logical.logical_group import LogicalGroup
from paceline.parallel.tensor_parallel.rules import elementwise, indexing, loss, matmul, views
from paceline.parallel.tensor_parallel.sharded_tensor import RULES, ShardPropagatingTensor
from paceline.parallel.tensor_parallel.sharding import DimSharding
from paceline.parallel.tensor_parallel.tensor_plan import ParameterShardings, TensorPlan, resolve_plan

_RULE_MODULES = (loss, elementwise, indexing, matmul, views)  # importing them fills RULES
assert len(RULES) > 100


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlacement:
    """The result of `split_model`.

    `shard_specs` locates this rank's shard of each parameter, by name. Each parameter is a plain tensor with the local
    shard. While the model runs, a `ShardPropagatingTensor` with the full shape stands in for it. After a forward that
    ended early, call `restore_parameters` to undo this. `close` removes the hooks; the parameters remain local shards.
    """

    shard_specs: dict[str, ShardSpec]
    plan: TensorPlan
    group: TensorParallelGroup
    close: Callable[[], None]
    restore_parameters: Callable[[], None]

    @property
    def notes(self) -> list[str]:
        """Return the plan's notes, and a note for each tensor that was gathered so far."""
        return [*self.plan.notes, *getattr(self.group, "notes", ())]


def split_model(
    model: nn.Module, *, plan: TensorPlan, world: World, sequence: bool = False, logical_shards: int | None = None
) -> TensorParallelPlacement:
    """Shard the model's parameters in place, and make its forward compute on the shards.

    With `logical_shards`, each weight consists of this number of logical shards, of which each rank holds equally many;
    then the number of ranks does not change the bits.

    Every rank of `world` calls this on the same full model, which may be on the meta device, and keeps its shards.
    Afterwards all ranks must run the model on the same batch, with the same states of random generators.

    Raises:
        LayoutError: the plan does not fit this model; the message names the parameter.
    """
    group: TensorParallelGroup = (
        WorldGroup(world, sequence=sequence) if logical_shards is None else LogicalGroup(world, size=logical_shards)
    )
    return split_model_in_group(model, plan=plan, group=group)


def split_model_in_group(model: nn.Module, *, plan: TensorPlan, group: TensorParallelGroup) -> TensorParallelPlacement:
    """Shard the model as `split_model` does, over any `TensorParallelGroup`."""
    shardings = resolve_plan(model, plan, ranks=group.size)
    shard_specs: dict[str, ShardSpec] = {}
    new_parameters: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            name = f"{prefix}.{key}" if prefix else key
            sharding = shardings.by_name.get(name)
            if id(parameter) in {id(p) for p in new_parameters.values()}:
                continue  # the module is registered twice
            if sharding is None:
                shard_specs[name] = ShardSpec.full(parameter.shape)
                continue
            ranges = _local_ranges(sharding, group)
            shard_specs[name] = ShardSpec.from_ranges(parameter.shape, dim=sharding.dim, ranges=ranges)
            if id(parameter) not in new_parameters:
                new_parameters[id(parameter)] = _shard_parameter(parameter, shard_specs[name])
            module.register_parameter(key, new_parameters[id(parameter)])
    close, restore_parameters = register_sharding_hooks(model, shardings, group)
    return TensorParallelPlacement(
        shard_specs={name: shard_specs[name] for name, _ in model.named_parameters()},  # a tied weight is listed once
        plan=plan,
        group=group,
        close=close,
        restore_parameters=restore_parameters,
    )


def _local_ranges(sharding: DimSharding, group: TensorParallelGroup) -> list[tuple[int, int]]:
    """Return the ranges of the sharded dimension that this process holds, one per section."""
    if not isinstance(group, LogicalGroup):
        return sharding.ranges(group.rank)
    return sharding.merge_ranks(group.ranks_per_process).ranges(group.rank // group.ranks_per_process)


def _shard_parameter(parameter: nn.Parameter, shard_spec: ShardSpec) -> nn.Parameter:
    """Return this rank's shard as a parameter with the attributes of the full one.

    A parameter that only another pipeline stage holds is a placeholder: one element, expanded to the full shape.
    """
    full_parameter = parameter.detach()
    is_placeholder = full_parameter.dim() > 0 and not any(full_parameter.stride())
    if is_placeholder and shard_spec.local_shape is not None:
        local_shard = (
            full_parameter[(0,) * full_parameter.dim()].expand(shard_spec.local_shape)
            if full_parameter.numel()
            else full_parameter
        )
    else:
        local_shard = shard_spec.extract(full_parameter)
    local_parameter = nn.Parameter(local_shard, requires_grad=parameter.requires_grad)
    local_parameter.__dict__.update(parameter.__dict__)
    return local_parameter


def register_sharding_hooks(
    model: nn.Module, shardings: ParameterShardings, group: TensorParallelGroup
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Register hooks that put a tensor with the full shape in place of each local shard while the model runs.

    Return a function that removes the hooks, and one that puts the local shards back.
    """
    handles: list[Any] = []
    replacements: list[_ParameterReplacement] = []
    for prefix, module in model.named_modules():
        if prefix in shardings.local_modules:
            handles += register_local_hooks(module, prefix, shardings.by_name, group)
            continue
        names = [key for key, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        module_shardings = {
            key: (name, shardings.by_name[name]) for key in names if (name := _join(prefix, key)) in shardings.by_name
        }
        if module_shardings:
            replacements.append(_ParameterReplacement(module, module_shardings, group))
            handles += replacements[-1].register_hooks()
    handles += _register_model_hooks(model, replacements)

    def restore_parameters() -> None:
        for replacement in replacements:
            replacement.restore_all()

    def close() -> None:
        for handle in handles:
            handle.remove()
        restore_parameters()

    return close, restore_parameters


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


class _ParameterReplacement:
    """The replacement of one module's parameters by sharded tensors.

    While the module runs, its `__dict__` contains the sharded tensors, which Python finds before the registered
    parameters of the same names. So the module sees the full shape, and all other code sees the plain shard.
    """

    def __init__(
        self, module: nn.Module, shardings: dict[str, tuple[str, DimSharding]], group: TensorParallelGroup
    ) -> None:
        self.module, self._shardings, self._group = module, shardings, group
        self._depth = 0
        self._sources: dict[str, Any] = {}

    def register_hooks(self) -> Sequence[Any]:
        return [
            self.module.register_forward_pre_hook(lambda *_: self.replace()),
            self.module.register_forward_hook(lambda *_: self.restore(), always_call=True),
        ]

    def replace(self) -> None:
        """Replace the parameters, at the start of a call that may be nested in other calls of the module."""
        self._depth += 1
        for key, (name, sharding) in self._shardings.items():
            parameter = self.module._parameters[key]
            if type(parameter) not in (nn.Parameter, Tensor) and _is_dtensor(parameter):
                continue  # FSDP has not gathered this parameter yet: it is replaced after the all-gather
            if key not in self.module.__dict__ or self._sources.get(key) is not parameter:
                assert parameter is not None
                self._sources[key] = parameter
                self.module.__dict__[key] = ShardPropagatingTensor.from_local(
                    local_piece(parameter, sharding, self._group), sharding, self._group, origins=(name,)
                )

    def restore(self) -> None:
        """Restore the parameters at the end of the outermost call."""
        self._depth -= 1
        if self._depth <= 0:
            self.restore_all()

    def restore_all(self) -> None:
        self._depth = 0
        self._sources.clear()
        for key in self._shardings:
            self.module.__dict__.pop(key, None)


def _is_dtensor(parameter: Any) -> bool:
    return type(parameter).__torch_function__ is not Tensor.__torch_function__ and hasattr(parameter, "placements")


def _register_model_hooks(model: nn.Module, replacements: list[_ParameterReplacement]) -> list[Any]:
    """Register hooks that replace all parameters during the model's forward.

    A module may read a parameter of another module, whose own hooks do not run then.
    """

    def replace(*_: Any) -> None:
        for replacement in replacements:
            replacement.replace()

    def restore(*_: Any) -> None:
        for replacement in replacements:
            replacement.restore()

    return [
        model.register_forward_pre_hook(replace, prepend=True),
        model.register_forward_hook(restore, always_call=True),
    ]
