"""Expert parallelism: experts sharded over the ranks of an `ep` axis, each of which has its own tokens.

Each rank holds some of the experts and all other parameters. An all-to-all sends tokens to the ranks of their experts,
the module's own forward runs on the received tokens, and a second all-to-all returns the results. The gradient of an
expert is then already the sum over the tokens of all `ep` ranks, so it is reduced only over data ranks outside the `ep`
group.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import LayoutError
from paceline.parallel.expert_parallel.discovery import ExpertsModule, expert_ranges, find_experts
from paceline.parallel.expert_parallel.token_dispatch import combine, dispatch, plan_route
from paceline.parallel.module_access.shard_spec import ShardSpec

ExpertRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ShardedExperts:
    """The result of `split_experts` on one rank.

    `parts` contains all sharded parameters, including those of which this rank holds nothing; `names` are the
    expert parameters that it holds.
    """

    shard_specs: Mapping[str, ShardSpec]
    names: frozenset[str]
    module_names: tuple[str, ...]
    _undos: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def close(self) -> None:
        """Restore the modules' own forward. Their parameters remain sharded."""
        for undo in self._undos:
            undo()
        self._undos.clear()


def split_experts(*, model: nn.Module, world: World | None = None, experts: str | None = None) -> ShardedExperts:
    """Remove the experts of other ranks from the model, in place; parameter names do not change.

    `experts` is a pattern for the names of the experts modules. It is needed if the parameter names of their forward do
    not identify them.

    Raises:
        LayoutError: there are no experts, or some cannot be sharded; the message names them.
    """
    world = world or World.alone()
    found = find_experts(model, pattern=experts)
    _refuse_tied_experts(model, found)
    parts: dict[str, ShardSpec] = {}
    undo: list[Callable[[], None]] = []
    for one in found:
        ranges = expert_ranges(one.num_experts, ranks=world.world_size)
        kept = ranges[world.rank]
        parts |= _shard_stacked(one, kept) if one.list_name is None else _shard_list(one, kept)
        undo.append(_wrap_forward(one, ranges, world))
    held = frozenset(name for name, part in parts.items() if part.local_shape is not None)
    return ShardedExperts(shard_specs=parts, names=held, module_names=tuple(one.name for one in found), _undos=undo)


def _shard_stacked(one: ExpertsModule, kept: tuple[int, int]) -> dict[str, ShardSpec]:
    parts: dict[str, ShardSpec] = {}
    for name in one.stacked_parameters:
        whole = getattr(one.module, name)
        part = ShardSpec.from_ranges(whole.shape, dim=0, ranges=[kept])
        mine = nn.Parameter(whole.detach()[kept[0] : kept[1]].clone(), requires_grad=whole.requires_grad)
        setattr(one.module, name, mine)
        parts[f"{one.name}.{name}"] = part
    for name, value in list(vars(one.module).items()):
        if type(value) is int and value == one.num_experts and "expert" in name:
            setattr(one.module, name, kept[1] - kept[0])  # the module's forward reads its number of experts here
    return parts


def _shard_list(one: ExpertsModule, kept: tuple[int, int]) -> dict[str, ShardSpec]:
    """Replace other ranks' experts by empty modules, so that the remaining ones keep their indices and names."""
    listed = getattr(one.module, str(one.list_name))
    start, stop = kept
    parts: dict[str, ShardSpec] = {}
    for place, expert in enumerate(listed):
        mine = start <= place < stop
        for name, parameter in expert.named_parameters():
            part = ShardSpec.full(parameter.shape) if mine else ShardSpec.empty(parameter.shape)
            parts[f"{one.name}.{one.list_name}.{place}.{name}"] = part
        if not mine:
            listed[place] = RemoteExpert()
    return parts


class RemoteExpert(nn.Module):
    """A placeholder for an expert that another rank holds; it never gets a token."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the empty input."""
        assert not len(tokens), "a token reached an expert of another rank"
        return tokens


def _wrap_forward(one: ExpertsModule, ranges: ExpertRanges, world: World) -> Callable[[], None]:
    """Wrap the forward in the token exchange, as a method, so that a copy of the module uses its own experts."""
    module = one.module
    taken = inspect.signature(module.forward)
    call: Callable[..., Tensor] = _ShardedForward(
        experts_module=one, original_forward=_forward_function(module), ranges=ranges, world=world
    )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return call(self, *taken.bind(*args, **kwargs).arguments.values())

    module.forward = MethodType(forward, module)

    def undo() -> None:
        vars(module).pop("forward", None)

    return undo


def _forward_function(module: nn.Module) -> Callable[..., Any]:
    """Return the forward as a function of (module, ...); a forward that was set on the instance ignores the module."""
    found: Any = module.forward
    own: Any = getattr(found, "__func__", None)
    return own if own is not None else lambda _, *args: found(*args)


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
                f"{self.experts_module.name} was called with experts {tuple(index.shape)} and weights {tuple(weight.shape)}.",
                cause="each token's chosen experts and their weights have one shape: (tokens, choices)",
                hint="weights of the chosen experts only, or leave ep out",
            )
        index = index.reshape(len(flat), -1) if len(flat) else index.reshape(0, index.shape[-1])
        route = plan_route(index, ranges=self.ranges, world=self.world)
        rows, weights = dispatch(flat, weight, route=route)
        listed = self.experts_module.list_name is not None
        first = self.ranges[self.world.rank][0] if listed else 0
        found = (
            self.original_forward(module, rows, route.expert_index[:, None] + first, weights[:, None])
            if len(rows) or listed
            else rows
        )
        trained = [p for p in module.parameters() if p.requires_grad]
        found = _JoinBackward.apply(not listed, found, rows, *trained)  # type: ignore[no-untyped-call]
        return combine(found, like=flat, route=route).view(tokens.shape)


class _JoinBackward(torch.autograd.Function):
    """An identity that makes this rank's backward take part in the all-to-alls even if the rank received no rows.

    Stacked experts without tokens get a zero gradient, as in one process, where other experts of the stack have tokens.
    """

    @staticmethod
    def forward(ctx: Any, zeros: bool, found: Tensor, *tied: Tensor) -> Tensor:
        ctx.zeros, ctx.tied = zeros, [(t.shape, t.dtype, t.device) for t in tied]
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, *rest = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.tied)
        return None, grads[0], first, *(rest if ctx.zeros else [None] * len(rest))


def _refuse_tied_experts(model: nn.Module, found: list[ExpertsModule]) -> None:
    """Raise if a parameter of an expert is tied to another parameter.

    Raises:
        LayoutError: a parameter is tied; the message gives both names.
    """
    mine = {id(p): f"{one.name}.{name}" for one in found for name, p in one.module.named_parameters()}
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in mine and id(parameter) in seen:
            raise LayoutError(
                f"{name} and {seen[id(parameter)]} are one parameter: experts that are tied can't be split.",
                hint="separate parameters for each block, or leave ep out",
            )
        seen[id(parameter)] = name
