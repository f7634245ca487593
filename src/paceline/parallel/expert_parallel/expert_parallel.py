"""Expert parallelism: experts sharded over the ranks of an `ep` axis.

Each rank holds some of the experts and all other parameters, and has its own tokens. An all-to-all sends each token to
the ranks of its experts. There the module's own forward runs on the received tokens, and a second all-to-all returns
the results. The gradient of an expert then already includes the tokens of all `ep` ranks. So it is reduced only over
the data-parallel ranks outside the `ep` group.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.errors import LayoutError
from paceline.parallel.expert_parallel.discovery import ExpertsModule, expert_ranges, find_experts
from paceline.parallel.expert_parallel.token_dispatch import combine, dispatch, plan_route
from paceline.parallel.module_access.shard_spec import ShardSpec

ExpertRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ShardedExperts:
    """The result of `split_experts` on one rank.

    `shard_specs` contains the parameters of all experts, also of those on other ranks. `names` are the expert
    parameters of which this rank holds at least a part. `module_names` are the names of the experts modules.
    """

    shard_specs: Mapping[str, ShardSpec]
    names: frozenset[str]
    module_names: tuple[str, ...]
    _undos: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def close(self) -> None:
        """Remove the forwards that `split_experts` has set, so that the classes' own forwards apply again.

        The parameters of the experts modules remain sharded.
        """
        for undo in self._undos:
            undo()
        self._undos.clear()


def split_experts(*, model: nn.Module, world: World | None = None, experts: str | None = None) -> ShardedExperts:
    """Remove the experts of other ranks from the model, in place; parameter names do not change.

    `experts` is a pattern that selects the experts modules by name, as in `find_experts`; by default all are sharded.

    Raises:
        LayoutError: the model has no experts, or has experts that cannot be sharded; the message names them.
    """
    world = world or World.alone()
    experts_modules = find_experts(model, pattern=experts)
    _refuse_tied_experts(model, experts_modules)
    shard_specs: dict[str, ShardSpec] = {}
    undos: list[Callable[[], None]] = []
    for experts_module in experts_modules:
        ranges = expert_ranges(experts_module.num_experts, ranks=world.world_size)
        local_range = ranges[world.rank]
        shard = _shard_stacked if experts_module.list_name is None else _shard_list
        shard_specs |= shard(experts_module, local_range)
        undos.append(_wrap_forward(experts_module, ranges, world))
    return ShardedExperts(
        shard_specs=shard_specs,
        names=frozenset(name for name, spec in shard_specs.items() if spec.local_shape is not None),
        module_names=tuple(experts_module.name for experts_module in experts_modules),
        _undos=undos,
    )


def _shard_stacked(experts_module: ExpertsModule, local_range: tuple[int, int]) -> dict[str, ShardSpec]:
    """Replace each stacked parameter by its rows for this rank's experts; return the shard specs by full name."""
    start, stop = local_range
    shard_specs: dict[str, ShardSpec] = {}
    for name in experts_module.stacked_parameters:
        full = getattr(experts_module.module, name)
        local = nn.Parameter(full.detach()[start:stop].clone(), requires_grad=full.requires_grad)
        setattr(experts_module.module, name, local)
        shard_specs[f"{experts_module.name}.{name}"] = ShardSpec.from_ranges(full.shape, dim=0, ranges=[local_range])
    for name, value in list(vars(experts_module.module).items()):
        if type(value) is int and value == experts_module.num_experts and "expert" in name:
            setattr(experts_module.module, name, stop - start)  # the module's forward reads its number of experts here
    return shard_specs


def _shard_list(experts_module: ExpertsModule, local_range: tuple[int, int]) -> dict[str, ShardSpec]:
    """Replace other ranks' experts by placeholders, so that this rank's experts keep their indices and names.

    Return the shard specs by full name.
    """
    experts = getattr(experts_module.module, str(experts_module.list_name))
    start, stop = local_range
    shard_specs: dict[str, ShardSpec] = {}
    for index, expert in enumerate(experts):
        is_local = start <= index < stop
        for name, parameter in expert.named_parameters():
            full_name = f"{experts_module.name}.{experts_module.list_name}.{index}.{name}"
            shard_specs[full_name] = (ShardSpec.full if is_local else ShardSpec.empty)(parameter.shape)
        if not is_local:
            experts[index] = RemoteExpert()
    return shard_specs


class RemoteExpert(nn.Module):
    """A placeholder for an expert that another rank holds; its input is always empty."""

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Return the empty input."""
        assert not len(tokens), "a token reached an expert of another rank"
        return tokens


def _wrap_forward(experts_module: ExpertsModule, ranges: ExpertRanges, world: World) -> Callable[[], None]:
    """Set a forward that exchanges tokens on the module; return a function that removes it from the module.

    The new forward is a bound method, so that a copy of the module uses the copy's experts.
    """
    module = experts_module.module
    signature = inspect.signature(module.forward)
    sharded_forward: Callable[..., Tensor] = _ShardedForward(
        experts_module=experts_module, original_forward=_forward_function(module), ranges=ranges, world=world
    )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return sharded_forward(self, *signature.bind(*args, **kwargs).arguments.values())

    module.forward = MethodType(forward, module)

    def undo() -> None:
        vars(module).pop("forward", None)

    return undo


def _forward_function(module: nn.Module) -> Callable[..., Any]:
    """Return the module's forward as a function whose first argument is the module.

    A forward that was set on the instance ignores this argument.
    """
    forward: Any = module.forward
    function: Any = getattr(forward, "__func__", None)
    return function if function is not None else lambda _, *args: forward(*args)


@dataclass(frozen=True, kw_only=True)
class _ShardedForward:
    """The forward of a module whose experts are sharded."""

    experts_module: ExpertsModule
    original_forward: Callable[..., Any]
    ranges: ExpertRanges
    world: World

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Dispatch the tokens, run this rank's experts, and combine the results. A collective call."""
        flat = tokens.reshape(-1, tokens.shape[-1])
        if index.shape != weight.shape or index.numel() % max(len(flat), 1):
            raise LayoutError(
                f"{self.experts_module.name} was called with experts {tuple(index.shape)} and "
                f"weights {tuple(weight.shape)}.",
                cause="each token's chosen experts and their weights have one shape: (tokens, choices)",
                hint="weights of the chosen experts only, or leave ep out",
            )
        index = index.reshape(len(flat), -1) if len(flat) else index.reshape(0, index.shape[-1])
        route = plan_route(index, ranges=self.ranges, world=self.world)
        rows, weights = dispatch(flat, weight, route=route)
        is_list = self.experts_module.list_name is not None
        first_expert = self.ranges[self.world.rank][0] if is_list else 0  # a list keeps the indices of all experts
        outputs = rows
        if len(rows) or is_list:
            outputs = self.original_forward(module, rows, route.expert_index[:, None] + first_expert, weights[:, None])
        trainable = [p for p in module.parameters() if p.requires_grad]
        outputs = _JoinBackward.apply(not is_list, outputs, rows, *trainable)  # type: ignore[no-untyped-call]
        return combine(outputs, like=flat, route=route).view(tokens.shape)


class _JoinBackward(torch.autograd.Function):
    """An identity that makes this rank's backward take part in the all-to-alls even if the rank received no rows.

    If this rank's stacked experts get no tokens, their gradient is zero rather than None. One process has a gradient
    for them too, because it stacks them with experts that get tokens.
    """

    @staticmethod
    @override
    def forward(ctx: Any, should_fill_zeros: bool, outputs: Tensor, *inputs: Tensor) -> Tensor:
        ctx.should_fill_zeros, ctx.input_specs = should_fill_zeros, [(t.shape, t.dtype, t.device) for t in inputs]
        return outputs.view_as(outputs)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        rows_gradient, *zeros = (
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.input_specs
        )
        return None, grads[0], rows_gradient, *(zeros if ctx.should_fill_zeros else [None] * len(zeros))


def _refuse_tied_experts(model: nn.Module, experts_modules: list[ExpertsModule]) -> None:
    """Refuse a model in which a parameter of an expert is tied to another parameter.

    Raises:
        LayoutError: a parameter is tied; the message gives both names.
    """
    expert_names = {
        id(p): f"{experts_module.name}.{name}"
        for experts_module in experts_modules
        for name, p in experts_module.module.named_parameters()
    }
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in expert_names and id(parameter) in first_names:
            raise LayoutError(
                f"{name} and {first_names[id(parameter)]} are one parameter: experts that are tied can't be split.",
                hint="separate parameters for each block, or leave ep out",
            )
        first_names[id(parameter)] = name
