"""Splitting of a model over tensor-parallel ranks: modules and names stay, each rank keeps its weight shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.tensor_parallel.collectives import TensorParallelGroup, WorldWire, copy_in, reduce_out
from paceline.parallel.tensor_parallel.rules import elementwise, indexing, loss, matmul, views
from paceline.parallel.tensor_parallel.sharded_tensor import RULES, ShardPropagatingTensor
from paceline.parallel.tensor_parallel.sharding import DimSharding
from paceline.parallel.tensor_parallel.tensor_plan import ParameterCuts, TensorPlan, cuts_of
from paceline.torch_internals.private_api import tree_flatten, tree_unflatten

_FILES_OF_RULES = (loss, elementwise, indexing, matmul, views)  # importing them fills RULES
assert len(RULES) > 100


@dataclass(frozen=True, kw_only=True)
class TensorPlaced:
    """The result of `split_model`.

    `parts`: what this rank holds of every parameter, by name. `summed`: parameters whose gradient each rank holds only
    in part; always empty, since backward sums them. `close` removes the hooks; the shards stay. `rest` hides the
    sharded parameters again; call it when the model's forward was left before its end.
    """

    parts: dict[str, ShardSpec]
    summed: frozenset[str]
    plan: TensorPlan
    wire: TensorParallelGroup
    close: Callable[[], None]
    rest: Callable[[], None]

    @property
    def notes(self) -> list[str]:
        """Return the plan's notes, and the tensors that had to be gathered so far."""
        return [*self.plan.notes, *getattr(self.wire, "told", ())]


def split_model(model: nn.Module, *, plan: TensorPlan, world: World, sequence: bool = False) -> TensorPlaced:
    """Shard the model's parameters in place, and make its forward work on the shards.

    Every rank of `world` calls this on the same whole model (meta tensors are enough) and keeps its own slices. All
    ranks must be given the same batch and have the same random generator states.

    Raises:
        LayoutError: the plan does not fit this model; the message names the parameter.
    """
    return split_over(model, plan=plan, wire=WorldWire(world, sequence=sequence))


def split_over(model: nn.Module, *, plan: TensorPlan, wire: TensorParallelGroup) -> TensorPlaced:
    """Shard the model as `split_model` does, over any `TensorParallelGroup`."""
    cuts = cuts_of(model, plan, ranks=wire.size)
    parts: dict[str, ShardSpec] = {}
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            name = f"{prefix}.{own}" if prefix else own
            cut = cuts.of.get(name)
            if id(parameter) in {id(p) for p in made.values()}:
                continue  # the module occurs twice
            if cut is None:
                parts[name] = ShardSpec.full(parameter.shape)
                continue
            parts[name] = ShardSpec.from_ranges(parameter.shape, dim=cut.dim, ranges=cut.ranges(wire.rank))
            if id(parameter) not in made:
                made[id(parameter)] = _own(parameter, parts[name])
            module.register_parameter(own, made[id(parameter)])
    undo, rest = show_cut_parameters(model, cuts, wire)
    return TensorPlaced(parts=_once(model, parts), summed=frozenset(), plan=plan, wire=wire, close=undo, rest=rest)


def _own(parameter: nn.Parameter, part: ShardSpec) -> nn.Parameter:
    whole = parameter.detach()
    if (
        whole.dim() and not any(whole.stride()) and part.local_shape is not None
    ):  # strides 0: another stage has the memory
        piece = whole[(0,) * whole.dim()].expand(part.local_shape) if whole.numel() else whole
    else:
        piece = part.extract(whole)
    own = nn.Parameter(piece, requires_grad=parameter.requires_grad)
    own.__dict__.update(parameter.__dict__)
    return own


def _once(model: nn.Module, parts: dict[str, ShardSpec]) -> dict[str, ShardSpec]:
    """Return the parts under the names that the model itself reports, each tied weight once."""
    return {name: parts[name] for name, _ in model.named_parameters()}


def show_cut_parameters(
    model: nn.Module, cuts: ParameterCuts, wire: TensorParallelGroup
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Show each sharded parameter as a sharded tensor while the model runs; return `undo` and `rest`."""
    handles: list[Any] = []
    shown: list[_Shown] = []
    for prefix, module in model.named_modules():
        if prefix in cuts.local:
            handles += _run_locally(module, wire)
            continue
        names = [own for own, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        own_cuts = {own: (name, cuts.of[name]) for own in names if (name := _join(prefix, own)) in cuts.of}
        if own_cuts:
            shown.append(_Shown(module, own_cuts, wire))
            handles += shown[-1].hooks()
    handles += _everywhere(model, shown)

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for each in shown:
            each.rest()

    def rest() -> None:
        for each in shown:
            each.rest()

    return undo, rest


def _join(prefix: str, own: str) -> str:
    return f"{prefix}.{own}" if prefix else own


class _Shown:
    """The sharded parameters of one module.

    While the module runs they are in its `__dict__`, which Python reads before the registered parameter of the same
    name: the module sees the whole shape, all other code sees the plain shard.
    """

    def __init__(self, module: nn.Module, cuts: dict[str, tuple[str, DimSharding]], wire: TensorParallelGroup) -> None:
        self.module, self._cuts, self._wire = module, cuts, wire
        self._depth = 0

    def hooks(self) -> Sequence[Any]:
        return [
            self.module.register_forward_pre_hook(lambda *_: self.show()),
            self.module.register_forward_hook(lambda *_: self.hide(), always_call=True),
        ]

    def show(self) -> None:
        self._depth += 1
        for own, (name, cut) in self._cuts.items():
            parameter = self.module._parameters[own]
            known = self.module.__dict__.get(own)
            if type(parameter) not in (nn.Parameter, Tensor) and not _is_plain(parameter):
                continue  # still sharded along another axis: shown after its all-gather
            if known is None or known.local is not parameter:
                assert parameter is not None
                self.module.__dict__[own] = ShardPropagatingTensor.of(parameter, cut, self._wire, origins=(name,))

    def hide(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self.rest()

    def rest(self) -> None:
        self._depth = 0
        for own in self._cuts:
            self.module.__dict__.pop(own, None)


def _is_plain(parameter: Any) -> bool:
    return type(parameter).__torch_function__ is Tensor.__torch_function__ or not hasattr(parameter, "placements")


def _everywhere(model: nn.Module, shown: list[_Shown]) -> list[Any]:
    """Register hooks that show every sharded weight during the whole forward, for modules that read a tied weight."""

    def show(*_: Any) -> None:
        for each in shown:
            each.show()

    def hide(*_: Any) -> None:
        for each in shown:
            each.hide()

    return [
        model.register_forward_pre_hook(show, prepend=True),
        model.register_forward_hook(hide, always_call=True),
    ]


def _run_locally(module: nn.Module, wire: TensorParallelGroup) -> list[Any]:
    """Run the module's own forward on its shards: input gradients and outputs are summed over ranks."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _mapped((args, kwargs), lambda x: _read(x, wire))

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return _mapped(output, lambda x: reduce_out(x, wire) if x.is_floating_point() else x)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _read(x: Tensor, wire: TensorParallelGroup) -> Tensor:
    return x.gathered(partial=True) if isinstance(x, ShardPropagatingTensor) else copy_in(x, wire)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    leaves, shape = tree_flatten(value)
    return tree_unflatten([change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape)
