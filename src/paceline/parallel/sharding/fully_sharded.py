"""ZeRO-3 on `fully_shard`: between uses, each rank holds only its rows of every parameter.

`fully_shard` gathers a unit's parameters before they are used and frees them afterwards. It does not reduce gradients:
the ZeRO-2 reducer takes them as soon as autograd has written them. So exact mode, parameters without a gradient and
replicas work as in ZeRO-2, and a unit may be any module. With replicas (hybrid sharding; Zhao et al., "PyTorch FSDP",
VLDB 2023) each rank all-reduces the gradient sums of its rows over the replicas.
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
from paceline.parallel.module_access.shard_spec import Parts, ShardSpec
from paceline.parallel.sharding.fsdp_options import FullySharded
from paceline.parallel.sharding.reduce_scatter import ScatterReducer
from paceline.parallel.sharding.row_shards import RowShard, RowSplit, cut_rows, shares_of, view_of
from paceline.parallel.sharding.sharded_model import DataGroups, Sharded, shard_zero12
from paceline.parallel.sharding.unit_gradient_order import one_input
from paceline.parallel.sharding.unit_guard import UnitGuards
from paceline.parallel.sharding.units import find_units
from paceline.parallel.sharding.zero1_zero2_reducers import ParameterAllGather
from paceline.parallel.tensor_parallel.user_hook_local_shards import expose_local_shards
from paceline.torch_internals.private_api import allocate_meta_tensors, is_view


class DeferredRows(Protocol):
    """A rank's rows of parameters on the meta device, by name: a dict, or an object that creates them in `pop`."""

    def __contains__(self, name: object, /) -> bool: ...

    def pop(self, name: str, /) -> Tensor: ...


def shard_fully(
    model: nn.Module,
    *,
    named: Sequence[NamedParameter],
    data: DataGroups,
    grid: FixedPointGrid | None = None,
    parts: Parts | None = None,
    asked: FullySharded | None = None,
    hollow: Collection[str] | None = None,
    without: Collection[str] = (),
    rows: DeferredRows | None = None,
) -> Sharded:
    """Shard the model in place; before, every rank holds the same full weights. On one rank nothing is sharded.

    `absent_names` are the parameters that other pipeline stages hold; None without a pipeline. In a pipeline the
    model's forward stops before its end, and other forwards run before its backward; so parameters outside all units
    stay gathered until the end of the step. `expert_names` are not sharded. With `base_specs`, the model is
    tensor-parallel, and activations between units may be sharded too. `deferred_rows` are this rank's rows if the
    parameters are on the meta device; they are removed as they are used.

    Raises:
        LayoutError: a parameter can't be sharded, or the model does not have a named unit.
    """
    asked = asked or FullySharded()
    if data.shard.world_size == 1:
        _refuse_alone(asked)
        return shard_zero12(stage=2, model=model, named=named, data=data, grid=grid, parts=parts)
    apart = {*(hollow or ()), *without}
    every = _held(model, apart)
    cut = cut_rows(every, places=data.shard.world_size)
    base = parts or {m.name: ShardSpec.all_of(m.parameter.shape) for m in every}
    kept = {m.name: m.parameter for m in every if not m.parameter.dim()}
    gone = {p for n, p in model.named_parameters() if n in apart}
    around = [*([expose_local_shards] if parts else []), *([one_input] if grid is not None else [])]
    guards = _wrap(model, data, asked, ignored=gone | set(kept.values()), is_left=hollow is not None, around=around)
    if rows is not None:
        where = torch.device("cpu") if asked.offload else data.shard.device
        _fill(model, rows, device=where, without={id(p) for p in gone})
    sources = {**kept, **_gathered(model, guards)}
    guards.begin()
    now = {n: p for n, p in model.named_parameters() if n not in apart}
    shares = [_share(member, now[member.name], cut, data.shard.rank, base) for member in named]
    whole = [share for share in shares if share.name in kept]
    settle = _Settle(model, ParameterAllGather(whole, cut=cut, world=data.shard), is_left=hollow is not None)
    leaves = [sources[share.name] for share in shares]
    reducer = ScatterReducer(
        shares=shares, sources=leaves, cut=cut, shard=data.shard, replicas=data.replicas, grid=grid, order=guards.order
    )
    return Sharded(
        shares=shares,
        reducer=reducer,
        spread=settle,
        settle=settle,
        parts={n: base[n] if n in kept else cut[n].part(base[n], data.shard.rank) for n in now},
        locals={name: _local(p) for name, p in now.items()},
        sources=leaves,
        data=data,
    )


class _Settle:
    """The synchronization after an update: send scalars to every rank, and reshard units that are still gathered.

    Backward usually reshards them. After an evaluation, or if the model's output hides its tensors, the root unit stays
    gathered, with outdated values. If the model `is_pipelined`, its forward has not ended for `fully_shard`, which then
    reshards only units with `reshard_after_forward`; so this option is on during the call.
    """

    def __init__(self, model: nn.Module, spread: ParameterAllGather, *, is_left: bool) -> None:
        self._left = model if is_left and isinstance(model, FSDPModule) else None
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._spread = spread

    def __call__(self) -> None:
        self._spread()
        if self._left is not None:
            self._left.set_reshard_after_forward(True, recurse=False)
        for module in self._sharded:
            module.reshard()
        if self._left is not None:
            self._left.set_reshard_after_forward(False, recurse=False)


def _wrap(
    model: nn.Module,
    data: DataGroups,
    asked: FullySharded,
    *,
    ignored: set[nn.Parameter],
    is_left: bool,
    around: Sequence[Callable[[nn.Module], AbstractContextManager[None]]],
) -> UnitGuards:
    """Apply `fully_shard` to the units and the model; it registers each unit's hooks inside the contexts `around`."""
    device = data.shard.device.type
    assert data.shard.group is not None
    mesh = DeviceMesh.from_group(data.shard.group, device, mesh_dim_names=("dp_shard",))
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if asked.offload else OffloadPolicy()
    units = [unit for unit in find_units(model, by=asked.units).values() if not ignored.issuperset(unit.parameters())]
    _refuse_mixed([*units, model], model, ignored)
    guards = UnitGuards(model, [*units, model], world=data.shard, is_left=is_left)
    for unit in [*units, model]:
        output = torch.float32 if asked.params is not None and unit is model else None
        with ExitStack() as stack:
            for each in (guards.around, *around):
                stack.enter_context(each(unit))
            unit.register_forward_hook(lambda unit, _, output: guards.watched(unit, _own_memory(output)))
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=False if is_left and unit is model else asked.reshard,
                mp_policy=MixedPrecisionPolicy(param_dtype=asked.params, output_dtype=output),
                offload_policy=offload,
                ignored_params=ignored,
            )
    if is_left and isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False, recurse=False)
    _prefetch(model, asked.prefetch)
    return guards


def row_parts(model: nn.Module, *, world: World, base: Parts | None = None) -> Parts:
    """Return the shard spec of each parameter on this rank of `world`, without scalars, which are not sharded.

    `base_specs`: the parameters to shard, with their shard specs after tensor parallelism; None: all parameters, each
    a full tensor.
    """
    before = {n: ShardSpec.all_of(p.shape) for n, p in model.named_parameters()} if base is None else base
    some = [(n, p) for n, p in model.named_parameters() if p.dim() and n in before]
    every = [NamedParameter(index=i, name=n, parameter=p) for i, (n, p) in enumerate(some)]
    cut = cut_rows(every, places=world.world_size)
    return {m.name: cut[m.name].part(before[m.name], world.rank) for m in every}


def _fill(model: nn.Module, rows: DeferredRows, *, device: torch.device, without: set[int]) -> None:
    allocate_meta_tensors(
        model, device=device, without=without | {id(buffer) for buffer in model.buffers() if buffer.is_meta}
    )
    for name, parameter in model.named_parameters():
        if name in rows:
            _local(parameter).copy_(rows.pop(name))


def _own_memory(output: Any) -> Any:
    """Return `output` with views cloned: a write to a view would drop the hook that gathers the unit for backward."""
    if isinstance(output, Tensor):
        return output.clone() if output.requires_grad and is_view(output) else output
    if type(output) in (tuple, list):
        return type(output)(_own_memory(item) for item in output)
    if isinstance(output, dict):
        for name, item in list(output.items()):
            own = _own_memory(item)
            if own is not item:
                output[name] = own
    return output


def _refuse_mixed(units: Sequence[nn.Module], model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raise LayoutError if a unit has parameters of several dtypes: a unit is gathered in one buffer."""
    names = {p: name for name, p in model.named_parameters()}
    taken = set(ignored)
    for unit in units:
        own = [p for p in unit.parameters() if p not in taken]
        taken.update(own)
        kinds = {p.dtype: names[p] for p in reversed(own) if p.requires_grad}
        if len(kinds) > 1:
            some = " and ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in kinds.items())
            raise LayoutError(
                f"fsdp gathers parameters of one dtype together, but one unit has {some}.",
                cause="some layers were cast in model=",
                hint="--train.precision bf16 and one dtype in model=; or --layout zero2",
            )


def _prefetch(model: nn.Module, ahead: int) -> None:
    """Set prefetching of `num_units` units in module order, which is the forward order if blocks form a chain."""
    units: list[FSDPModule] = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    for place, unit in enumerate(units if ahead else ()):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(place - ahead, 0) : place][::-1])


def _gathered(model: nn.Module, guards: UnitGuards) -> dict[str, nn.Parameter]:
    """Return the unsharded parameters, to which autograd writes; each unit is gathered once to find them."""
    holders = dict(model.named_parameters())
    first = {id(p): name for name, p in holders.items()}
    found: dict[str, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            own = [(owner, name, first[id(p)]) for owner, name, p in _sharded_in(module)]
            module.unshard()
            for owner, name, known_as in own:
                parameter = getattr(owner, name)
                if not isinstance(parameter, DTensor):
                    found[known_as] = parameter
                    guards.know(module, known_as, owner, name, [holders[known_as], parameter])
            module.reshard()
    return found


def _sharded_in(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]


def _share(
    member: NamedParameter, holder: nn.Parameter, cut: Mapping[str, RowSplit], place: int, base: Parts
) -> RowShard:
    """Return this rank's shard of a parameter: a view of the local storage that `fully_shard` gathers from."""
    if not isinstance(holder, DTensor):
        return shares_of([member], cut=dict(cut), place=place, parts=base)[0]
    local = _local(holder)
    assert tuple(local.shape) == cut[member.name].shape_of(place), member.name
    return RowShard(
        index=member.index,
        name=member.name,
        parameter=view_of(local),
        part=cut[member.name].part(base[member.name], place),
        holder=holder,
    )


def _local(parameter: Tensor) -> Tensor:
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()


def _held(model: nn.Module, apart: Collection[str]) -> list[NamedParameter]:
    held = [(n, p) for n, p in model.named_parameters() if n not in apart]
    every = [NamedParameter(index=i, name=n, parameter=p) for i, (n, p) in enumerate(held)]
    for member in every:
        if not member.parameter.is_contiguous():
            raise LayoutError(
                f"fsdp can't shard {member.name}: its memory is not contiguous.",
                cause="a transposed or channels_last weight",
                hint="parameter.data = parameter.data.contiguous() at the end of model=, or --layout zero2",
            )
    return every


def _refuse_alone(asked: FullySharded) -> None:
    if asked.params is not None or asked.offload:
        what = f"params={asked.params}" if asked.params is not None else "offload"
        raise LayoutError(
            f"fsdp on one rank gathers nothing, so {what} has no effect.",
            hint="--ranks 2 or more, or leave it out",
        )
