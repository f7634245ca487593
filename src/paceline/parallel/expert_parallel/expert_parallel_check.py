"""A check, in one process and before the run starts, that a model gives the same results with sharded experts.

As for `cp`, threads simulate the ranks, in float64. The experts run in training mode, all other modules in evaluation
mode. The check rejects an experts forward that draws random numbers, does not derive the number of experts from its
parameters, drops tokens beyond a capacity, or combines several tokens.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks
from paceline.errors import LayoutError
from paceline.parallel.context_parallel.compare_split_results import equal_up_to_rounding
from paceline.parallel.context_parallel.context_parallel_check import Float64Mode, to_float64, use_eager_experts
from paceline.parallel.expert_parallel.discovery import find_experts
from paceline.parallel.expert_parallel.expert_parallel import split_experts
from paceline.parallel.module_access.model_copy import copy_model
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.module_access.user_call_isolation import side_effect_free
from paceline.torch_internals.pytree import tensor_leaves
from paceline.torch_internals.rng import cpu_rng_states

_TOKENS = 64


def check_experts(
    *,
    model: nn.Module,
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    experts: str | None = None,
) -> None:
    """Compare `forward(model, batch)` on one batch per rank, with all experts and with sharded experts.

    Raises:
        LayoutError: the experts cannot be sharded, or outputs or gradients differ.
    """
    twin = use_eager_experts(copy_model(model).double().eval())
    for found in find_experts(twin, pattern=experts):
        found.module.train()
    data = [to_float64(batch) for batch in batches]
    with side_effect_free(model, parameters=False), _record_calls(twin, experts) as seen:
        whole = [_outputs_and_gradients(twin, batch, forward) for batch in data]
    for one in find_experts(twin, pattern=experts):
        for width, choices in sorted(seen.get(one.name, ())):
            if not _is_tokenwise(copy_model(one.module), num_experts=one.num_experts, width=width, num_choices=choices):
                raise _different_results("outputs", one.name)
    names = [name for name, parameter in twin.named_parameters() if parameter.requires_grad]
    wanted = {name: _sum_present([found[1].get(name) for found in whole]) for name in names}

    def played(
        world: World,
    ) -> tuple[list[Tensor], dict[str, Tensor | None], dict[str, ShardSpec], tuple[str, ...]]:
        mine = copy_model(twin)
        placed = split_experts(model=mine, world=world, experts=experts)
        return *_outputs_and_gradients(mine, data[world.rank], forward), dict(placed.shard_specs), placed.module_names

    with side_effect_free(model, parameters=False):
        ranks = run_simulated_ranks(played, ranks=len(data))
    modules = ", ".join(ranks[0][3])
    for (outputs, _), mine in zip(whole, ranks, strict=True):
        if not all(equal_up_to_rounding(a, b) for a, b in zip(mine[0], outputs, strict=True)):
            raise _different_results("outputs", modules)
    for name, right in wanted.items():
        if not _is_gradient_equal(name, right, ranks):
            raise _different_results(f"gradients of {name}", modules)


@contextmanager
def _record_calls(model: nn.Module, pattern: str | None) -> Iterator[dict[str, set[tuple[int, int]]]]:
    """Record the token widths and the numbers of choices of each experts module's calls.

    Raises:
        LayoutError: a module draws random numbers, which would differ when the experts are sharded.
    """
    device = next(model.parameters()).device
    seen: dict[str, set[tuple[int, int]]] = {}
    before: list[object] = []

    def drawn() -> object:
        return cpu_rng_states(), None if device.type == "cpu" else torch.cuda.get_rng_state(device).numpy().tobytes()

    def entered(*_: Any) -> None:
        before.append(drawn())

    def left(name: str, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        tokens, index, *_ = inspect.signature(module.forward).bind(*args, **kwargs).arguments.values()
        seen.setdefault(name, set()).add((tokens.shape[-1], index.shape[-1]))
        if before.pop() != drawn():
            raise LayoutError(
                f"the experts of {name} draw random numbers in their forward: spread over ranks, tokens "
                "would get different ones.",
                cause="dropout or noise inside an expert",
                hint="apply the dropout to the experts module's output; or leave ep out",
            )

    with ExitStack() as stack:
        for one in find_experts(model, pattern=pattern):
            stack.callback(one.module.register_forward_pre_hook(entered).remove)
            stack.callback(one.module.register_forward_hook(partial(left, one.name), with_kwargs=True).remove)
        yield seen


def _is_tokenwise(module: nn.Module, *, num_experts: int, width: int, num_choices: int) -> bool:
    """Return whether each token's result is independent of the other tokens.

    The tokens are computed together and in two halves, once spread over all experts and once with the same experts.
    """
    draw = torch.Generator().manual_seed(0)
    device = next(module.parameters()).device
    with torch.no_grad(), Float64Mode():
        for parameter in module.parameters():  # initial zeros would hide differences
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype).to(device))
        tokens = torch.randn(_TOKENS, width, generator=draw, dtype=torch.float64).to(device)
        weight = torch.rand(_TOKENS, num_choices, generator=draw, dtype=torch.float64).to(device)
        spread = torch.arange(_TOKENS * num_choices, device=device).view(_TOKENS, num_choices) % num_experts
        for index in (spread, torch.arange(num_choices, device=device).expand(_TOKENS, num_choices)):
            half = _TOKENS // 2
            whole = module(tokens, index, weight)
            parts = [module(tokens[at], index[at], weight[at]) for at in (slice(half), slice(half, None))]
            if not equal_up_to_rounding(torch.cat(parts), whole):
                return False
    return True


def _outputs_and_gradients(model: nn.Module, batch: Any, forward: Any) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    with Float64Mode():
        outputs = [t for t in tensor_leaves(forward(model, batch)) if t.is_floating_point() and t.requires_grad]
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    weights = [torch.linspace(-1.0, 1.0, t.numel(), dtype=t.dtype, device=t.device).view(t.shape) for t in outputs]
    total = torch.stack([(t * w).sum() for t, w in zip(outputs, weights, strict=True)]).sum()
    gradients = torch.autograd.grad(total, [parameter for _, parameter in named], allow_unused=True)
    return [t.detach() for t in outputs], dict(zip([name for name, _ in named], gradients, strict=True))


def _sum_present(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.stack(there).sum(0) if there else None


def _is_gradient_equal(name: str, right: Tensor | None, ranks: Sequence[Any]) -> bool:
    if name not in ranks[0][2]:
        total = _sum_present([found[1].get(name) for found in ranks])
        return (total is None) == (right is None) and (
            total is None or right is None or equal_up_to_rounding(total, right)
        )
    for _, gradients, parts, _ in ranks:
        mine = gradients.get(name)
        if parts[name].local_shape is not None and (mine is None) != (right is None):
            return False
        if mine is not None and right is not None and not equal_up_to_rounding(mine, parts[name].extract(right)):
            return False
    return True


def _different_results(what: str, modules: str) -> LayoutError:
    return LayoutError(
        f"with the experts of {modules} spread over ranks, the model's {what} differ.",
        cause="their forward combines several tokens (a capacity, a statistic), or counts its experts "
        "by something other than its parameters",
        hint="out[token] = sum over choices of weight * expert(token), and nothing else, in that "
        "forward; or leave ep out",
    )
