"""ZeRO-3 on `fully_shard`: between uses, each rank holds only its rows of every parameter.

`fully_shard` gathers a unit's parameters before they are used and frees them afterwards. It does not reduce gradients
here: the ZeRO-2 reducer removes each gradient as soon as autograd has written it. So exact mode, parameters without a
gradient and replicas work as in ZeRO-2, and a unit may be any module. With replicas (hybrid sharding; Zhao et al.,
"PyTorch FSDP", VLDB 2023) each rank all-reduces the gradient sums of its rows over the replicas.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.comm.process_group import World
from paceline.errors import LayoutError
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs
from paceline.parallel.sharding.fsdp_options import FullShardOptions
from paceline.parallel.sharding.reduce_scatter_gradients import ScatterReducer
from paceline.parallel.sharding.row_shards import RowShard, RowSplit, make_row_shards, make_row_splits, parameter_view
from paceline.parallel.sharding.sharded_model import DataGroups, ShardedModel, shard_zero12
from paceline.parallel.sharding.unit_gradient_order import keep_gradient_order
from paceline.parallel.sharding.unit_guard import UnitGuards
from paceline.parallel.sharding.units import find_units
from paceline.parallel.sharding.zero1_zero2_reducers import ParameterAllGather
from paceline.parallel.tensor_parallel.user_hook_local_shards import expose_local_shards
from paceline.torch_internals.fsdp_units import GatheredUnits
from paceline.torch_internals.private_api import allocate_meta_tensors, is_view


class DeferredRows(Protocol):
    """A rank's rows of parameters on the meta device, by name: a dict, or an object that creates them in `pop`."""

    def __contains__(self, name: object, /) -> bool: ...

    def pop(self, name: str, /) -> Tensor: ...


def shard_zero3(
    model: nn.Module, *, named_parameters: Sequence[NamedParameter], data_groups: DataGroups,
    grid: FixedPointGrid | None = None, base_specs: ShardSpecs | None = None, options: FullShardOptions | None = None,
    absent_names: Collection[str] | None = None, expert_names: Collection[str] = (),
    deferred_rows: DeferredRows | None = None, has_several_forwards: bool = False,
) -> ShardedModel:  # fmt: skip
    """Shard the model in place. Every rank calls this with the same full weights; on one rank nothing is sharded.

    `absent_names` are the parameters of other pipeline stages; None means that there is no pipeline. In a pipeline,
    other forwards run before the model's backward, so parameters outside all units stay gathered until the end of the
    step. `expert_names` are the expert parameters, which are not sharded here. `base_specs` are the shard specs after
    tensor parallelism. `deferred_rows` are this rank's rows of a model on the meta device. With `has_several_forwards`,
    several forwards of a microbatch run in turns, so units stay gathered from their first use to the end of the step.

    Raises:
        LayoutError: a parameter can't be sharded, or `options` names a unit that the model does not have.
    """
    options, shard_world = options or FullShardOptions(), data_groups.shard_world
    if shard_world.world_size == 1:
        _refuse_single_rank(options)
        return shard_zero12(
            stage=2, model=model, named_parameters=named_parameters, data_groups=data_groups,
            grid=grid, base_specs=base_specs,
        )  # fmt: skip
    excluded = {*(absent_names or ()), *expert_names}
    parameters = _contiguous_parameters(model, excluded)
    splits = make_row_splits(parameters, num_shards=shard_world.world_size)
    specs = base_specs or {m.name: ShardSpec.full(m.parameter.shape) for m in parameters}
    scalars = {m.name: m.parameter for m in parameters if not m.parameter.dim()}
    ignored = {p for n, p in model.named_parameters() if n in excluded}
    contexts = [*([expose_local_shards] if base_specs else []), *([keep_gradient_order] if grid is not None else [])]
    guards = _apply_fully_shard(
        model, data_groups, options, ignored=ignored | set(scalars.values()),
        is_pipelined=absent_names is not None, contexts=contexts,
    )  # fmt: skip
    if deferred_rows is not None:
        device, ignored_ids = torch.device("cpu") if options.offload else shard_world.device, {id(p) for p in ignored}
        _fill_deferred_rows(model, deferred_rows, device=device, excluded_ids=ignored_ids)
    leaf_by_name = {**scalars, **_find_unsharded_parameters(model, guards)}
    guards.intercept_calls()
    local_parameters = {n: p for n, p in model.named_parameters() if n not in excluded}
    row_shards = [
        _make_row_shard(m, local_parameters[m.name], splits, shard_world.rank, specs) for m in named_parameters
    ]
    scalar_shards = [shard for shard in row_shards if shard.name in scalars]
    gather = ParameterAllGather(scalar_shards, row_splits=splits, world=shard_world)
    sync = _PostUpdateSync(model, gather, is_pipelined=absent_names is not None, stays_gathered=has_several_forwards)
    leaves = [leaf_by_name[shard.name] for shard in row_shards]
    reducer = ScatterReducer(
        row_shards=row_shards, leaf_parameters=leaves, row_splits=splits, shard_world=shard_world,
        replica_world=data_groups.replica_world, grid=grid, order_check=guards.order_check,
    )  # fmt: skip
    return ShardedModel(
        row_shards=row_shards, reducer=reducer, sync_after_update=sync, sync_after_load=sync,
        shard_specs={
            n: specs[n] if n in scalars else splits[n].shard_spec(specs[n], shard_world.rank) for n in local_parameters
        },
        local_tensors={name: _local_tensor(p) for name, p in local_parameters.items()},
        leaf_parameters=leaves, data_groups=data_groups,
    )  # fmt: skip


class _PostUpdateSync:
    """The synchronization after an update: send scalars to every rank, and reshard units that are still gathered.

    Backward usually reshards the units. But the root unit stays gathered, with outdated values, after an evaluation, or
    if the model's output is an object that hides its tensors. In a pipeline, `fully_shard` does not see the end of the
    model's forward. `reshard` then affects only units with `reshard_after_forward`, so `__call__` switches this option
    on for a moment. With `stays_gathered`, only this object frees units.
    """

    def __init__(
        self, model: nn.Module, all_gather_scalars: ParameterAllGather, *, is_pipelined: bool, stays_gathered: bool
    ) -> None:
        self._pipelined_model = model if is_pipelined and isinstance(model, FSDPModule) else None
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._all_gather_scalars = all_gather_scalars
        self._gathered_units = GatheredUnits(self._sharded) if stays_gathered else None

    def __call__(self) -> None:
        self._all_gather_scalars()
        if self._pipelined_model is not None:
            self._pipelined_model.set_reshard_after_forward(True, recurse=False)
        if self._gathered_units is not None:
            self._gathered_units.free()
        else:
            for module in self._sharded:
                module.reshard()
        if self._pipelined_model is not None:
            self._pipelined_model.set_reshard_after_forward(False, recurse=False)


def _apply_fully_shard(
    model: nn.Module,
    data_groups: DataGroups,
    options: FullShardOptions,
    *,
    ignored: set[nn.Parameter],
    is_pipelined: bool,
    contexts: Sequence[Callable[[nn.Module], AbstractContextManager[None]]],
) -> UnitGuards:
    """Apply `fully_shard` to the units and the model; return the guards of the units.

    A guard raises an error where a unit would silently behave differently than in one process: see `unit_guard`.
    `fully_shard` registers the hooks of a unit inside the contexts that the functions in `contexts` return for this
    unit. `ignored` are the parameters that are not sharded.
    """
    device = data_groups.shard_world.device.type
    assert data_groups.shard_world.group is not None
    mesh = DeviceMesh.from_group(data_groups.shard_world.group, device, mesh_dim_names=("dp_shard",))
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if options.offload else OffloadPolicy()
    units = [
        unit for unit in find_units(model, choice=options.units).values() if not ignored.issuperset(unit.parameters())
    ]
    _refuse_mixed_dtypes([*units, model], model, ignored)
    guards = UnitGuards(model, [*units, model], world=data_groups.shard_world, is_pipelined=is_pipelined)
    for unit in [*units, model]:
        output_dtype = torch.float32 if options.param_dtype is not None and unit is model else None
        with ExitStack() as stack:
            for context in (guards.add_hooks_around, *contexts):
                stack.enter_context(context(unit))
            unit.register_forward_hook(lambda unit, _, output: guards.watch_output(unit, _clone_views(output)))
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=False if is_pipelined and unit is model else options.reshard,
                mp_policy=MixedPrecisionPolicy(param_dtype=options.param_dtype, output_dtype=output_dtype),
                offload_policy=offload,
                ignored_params=ignored,
            )
    if is_pipelined and isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False, recurse=False)
    _set_prefetch(model, options.prefetch)
    return guards


def row_shard_specs(model: nn.Module, *, world: World, base_specs: ShardSpecs | None = None) -> ShardSpecs:
    """Return the shard spec of each parameter on this rank of `world`, without scalars, which are not sharded.

    `base_specs` are the shard specs, after tensor parallelism, of the parameters to shard; None means that all
    parameters are sharded, and are full tensors before.
    """
    specs_before = (
        {n: ShardSpec.full(p.shape) for n, p in model.named_parameters()} if base_specs is None else base_specs
    )
    shardable = [(n, p) for n, p in model.named_parameters() if p.dim() and n in specs_before]
    parameters = [NamedParameter(index=i, name=n, parameter=p) for i, (n, p) in enumerate(shardable)]
    row_splits = make_row_splits(parameters, num_shards=world.world_size)
    return {m.name: row_splits[m.name].shard_spec(specs_before[m.name], world.rank) for m in parameters}


def _fill_deferred_rows(
    model: nn.Module, deferred_rows: DeferredRows, *, device: torch.device, excluded_ids: set[int]
) -> None:
    """Allocate the model's sharded parameters on `device`, and fill them with this rank's rows."""
    allocate_meta_tensors(
        model, device=device, excluded_ids=excluded_ids | {id(buffer) for buffer in model.buffers() if buffer.is_meta}
    )
    for name, parameter in model.named_parameters():
        if name in deferred_rows:
            _local_tensor(parameter).copy_(deferred_rows.pop(name))


def _clone_views(output: Any) -> Any:
    """Return `output` with views cloned: a write to a view would drop the hook that gathers the unit for backward."""
    if isinstance(output, Tensor):
        return output.clone() if output.requires_grad and is_view(output) else output
    if type(output) in (tuple, list):
        return type(output)(_clone_views(item) for item in output)
    if isinstance(output, dict):
        for name, item in list(output.items()):
            cloned = _clone_views(item)
            if cloned is not item:
                output[name] = cloned
    return output


def _refuse_mixed_dtypes(units: Sequence[nn.Module], model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raise LayoutError if a unit has trainable parameters of several dtypes: a unit is gathered in one buffer."""
    names = {p: name for name, p in model.named_parameters()}
    assigned = set(ignored)
    for unit in units:
        unit_parameters = [p for p in unit.parameters() if p not in assigned]
        assigned.update(unit_parameters)
        names_by_dtype = {p.dtype: names[p] for p in reversed(unit_parameters) if p.requires_grad}
        if len(names_by_dtype) > 1:
            description = " and ".join(
                f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in names_by_dtype.items()
            )
            raise LayoutError(
                f"fsdp gathers parameters of one dtype together, but one unit has {description}.",
                cause="some layers were cast in model=",
                hint="--train.precision bf16 and one dtype in model=; or --layout zero2",
            )


def _set_prefetch(model: nn.Module, num_units: int) -> None:
    """Make each unit prefetch the next `num_units` units; their order in the model is taken as the forward order."""
    units: list[FSDPModule] = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    for position, unit in enumerate(units if num_units else ()):
        unit.set_modules_to_forward_prefetch(units[position + 1 : position + 1 + num_units])
        unit.set_modules_to_backward_prefetch(units[max(position - num_units, 0) : position][::-1])


def _find_unsharded_parameters(model: nn.Module, guards: UnitGuards) -> dict[str, nn.Parameter]:
    """Return the gathered parameters, to which autograd writes, by name; gather each unit once to find them.

    Also register the sharded and the gathered form of each parameter with the guards.
    """
    model_parameters = dict(model.named_parameters())
    first_names = {id(p): name for name, p in model_parameters.items()}
    unsharded: dict[str, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sharded = [(owner, name, first_names[id(p)]) for owner, name, p in _sharded_parameters(module)]
            module.unshard()
            for owner, name, full_name in sharded:
                parameter = getattr(owner, name)
                if not isinstance(parameter, DTensor):
                    unsharded[full_name] = parameter
                    sharded_parameter = model_parameters[full_name]
                    guards.register_parameter(
                        module, full_name, owner, name, sharded=sharded_parameter, gathered=parameter
                    )
            module.reshard()
    return unsharded


def _sharded_parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return the parameters that `fully_shard` has sharded: their modules, their names there, and themselves."""
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]


def _make_row_shard(
    member: NamedParameter,
    model_parameter: nn.Parameter,
    row_splits: Mapping[str, RowSplit],
    shard_rank: int,
    base_specs: ShardSpecs,
) -> RowShard:
    """Return this rank's shard of a parameter: a view of the local storage that `fully_shard` gathers from."""
    if not isinstance(model_parameter, DTensor):
        return make_row_shards([member], row_splits=dict(row_splits), shard_rank=shard_rank, base_specs=base_specs)[0]
    local = _local_tensor(model_parameter)
    assert tuple(local.shape) == row_splits[member.name].shard_shape(shard_rank), member.name
    return RowShard(
        index=member.index,
        name=member.name,
        parameter=parameter_view(local),
        shard_spec=row_splits[member.name].shard_spec(base_specs[member.name], shard_rank),
        model_parameter=model_parameter,
    )


def _local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a sharded parameter, or an unsharded parameter itself, without gradient."""
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()


def _contiguous_parameters(model: nn.Module, excluded_names: Collection[str]) -> list[NamedParameter]:
    """Return the model's parameters without the excluded ones; raise LayoutError if one is not contiguous."""
    local_parameters = [(n, p) for n, p in model.named_parameters() if n not in excluded_names]
    parameters = [NamedParameter(index=i, name=n, parameter=p) for i, (n, p) in enumerate(local_parameters)]
    for member in parameters:
        if not member.parameter.is_contiguous():
            raise LayoutError(
                f"fsdp can't shard {member.name}: its memory is not contiguous.",
                cause="a transposed or channels_last weight",
                hint="parameter.data = parameter.data.contiguous() at the end of model=, or --layout zero2",
            )
    return parameters


def _refuse_single_rank(options: FullShardOptions) -> None:
    if options.param_dtype is not None or options.offload:
        option = f"params={options.param_dtype}" if options.param_dtype is not None else "offload"
        raise LayoutError(
            f"fsdp on one rank gathers nothing, so {option} has no effect.",
            hint="--ranks 2 or more, or leave it out",
        )
