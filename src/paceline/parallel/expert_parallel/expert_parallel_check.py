"""A check, in one process and before the run starts, that a model gives the same results with sharded experts.

Threads simulate the ranks, in float64, as in `context_parallel_check`. The experts run in training mode, all other
modules in evaluation mode. The check rejects an experts module if its forward draws random numbers, drops tokens beyond
a capacity, or combines several tokens. It also rejects a forward that takes the number of experts from a value that
`split_experts` does not change. `split_experts` changes the parameters, and int attributes such as `num_experts`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class _RankResult:
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    shard_specs: Mapping[str, ShardSpec]
    module_names: tuple[str, ...]


def check_experts(
    *,
    model: nn.Module,
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    experts: str | None = None,
) -> None:
    """Compare `forward(model, batch)` with unsharded and with sharded experts. `batches` has one batch per rank.

    Raises:
        LayoutError: the experts cannot be sharded, or outputs or gradients differ.
    """
    full_model = use_eager_experts(copy_model(model).double().eval())
    for experts_module in find_experts(full_model, pattern=experts):
        experts_module.module.train()
    data = [to_float64(batch) for batch in batches]
    with side_effect_free(model, parameters=False), _record_calls(full_model, experts) as call_shapes:
        full_results = [_outputs_and_gradients(full_model, batch, forward) for batch in data]
    for experts_module in find_experts(full_model, pattern=experts):
        num_experts = experts_module.num_experts
        for width, num_choices in sorted(call_shapes.get(experts_module.name, ())):
            module = copy_model(experts_module.module)
            if not _is_tokenwise(module, num_experts=num_experts, width=width, num_choices=num_choices):
                raise _different_results_error("outputs", experts_module.name)

    def run_rank(world: World) -> _RankResult:
        sharded_model = copy_model(full_model)
        sharded_experts = split_experts(model=sharded_model, world=world, experts=experts)
        outputs, gradients = _outputs_and_gradients(sharded_model, data[world.rank], forward)
        return _RankResult(
            outputs=outputs,
            gradients=gradients,
            shard_specs=sharded_experts.shard_specs,
            module_names=sharded_experts.module_names,
        )

    with side_effect_free(model, parameters=False):
        rank_results = run_simulated_ranks(run_rank, ranks=len(data))
    modules = ", ".join(rank_results[0].module_names)
    for (expected_outputs, _), rank_result in zip(full_results, rank_results, strict=True):
        pairs = zip(rank_result.outputs, expected_outputs, strict=True)
        if not all(equal_up_to_rounding(result, expected) for result, expected in pairs):
            raise _different_results_error("outputs", modules)
    for name in [name for name, parameter in full_model.named_parameters() if parameter.requires_grad]:
        expected = _sum_present([gradients.get(name) for _, gradients in full_results])
        if not _is_gradient_equal(name, expected, rank_results):
            raise _different_results_error(f"gradients of {name}", modules)


@contextmanager
def _record_calls(model: nn.Module, pattern: str | None) -> Iterator[dict[str, set[tuple[int, int]]]]:
    """Record, by experts module, the pairs (token width, choices per token) with which the model calls it.

    Raises:
        LayoutError: a module draws random numbers, which would differ if the experts were sharded.
    """
    device = next(model.parameters()).device
    call_shapes: dict[str, set[tuple[int, int]]] = {}
    rng_states: list[object] = []

    def rng_state() -> object:
        return cpu_rng_states(), None if device.type == "cpu" else torch.cuda.get_rng_state(device).numpy().tobytes()

    def before_forward(*_: Any) -> None:
        rng_states.append(rng_state())

    def after_forward(name: str, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        tokens, index, *_ = inspect.signature(module.forward).bind(*args, **kwargs).arguments.values()
        call_shapes.setdefault(name, set()).add((tokens.shape[-1], index.shape[-1]))
        if rng_states.pop() != rng_state():
            raise LayoutError(
                f"the experts of {name} draw random numbers in their forward: spread over ranks, tokens "
                "would get different ones.",
                cause="dropout or noise inside an expert",
                hint="apply the dropout to the experts module's output; or leave ep out",
            )

    with ExitStack() as stack:
        for experts_module in find_experts(model, pattern=pattern):
            stack.callback(experts_module.module.register_forward_pre_hook(before_forward).remove)
            hook = partial(after_forward, experts_module.name)
            stack.callback(experts_module.module.register_forward_hook(hook, with_kwargs=True).remove)
        yield call_shapes


def _is_tokenwise(module: nn.Module, *, num_experts: int, width: int, num_choices: int) -> bool:
    """Return whether each token's result is independent of the other tokens.

    Tokens are computed together and then in two halves. The test is made twice: with tokens routed to all experts in
    turn, and with all tokens routed to the same experts.
    """
    generator = torch.Generator().manual_seed(0)
    device = next(module.parameters()).device
    with torch.no_grad(), Float64Mode():
        for parameter in module.parameters():  # initial zeros would hide differences
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(device))
        tokens = torch.randn(_TOKENS, width, generator=generator, dtype=torch.float64).to(device)
        weight = torch.rand(_TOKENS, num_choices, generator=generator, dtype=torch.float64).to(device)
        spread = torch.arange(_TOKENS * num_choices, device=device).view(_TOKENS, num_choices) % num_experts
        for index in (spread, torch.arange(num_choices, device=device).expand(_TOKENS, num_choices)):
            half = _TOKENS // 2
            joint = module(tokens, index, weight)
            halves = [module(tokens[rows], index[rows], weight[rows]) for rows in (slice(half), slice(half, None))]
            if not equal_up_to_rounding(torch.cat(halves), joint):
                return False
    return True


def _outputs_and_gradients(model: nn.Module, batch: Any, forward: Any) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Return the model's outputs, and the gradients of a weighted sum of them by parameter name."""
    with Float64Mode():
        outputs = [t for t in tensor_leaves(forward(model, batch)) if t.is_floating_point() and t.requires_grad]
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    weights = [torch.linspace(-1.0, 1.0, t.numel(), dtype=t.dtype, device=t.device).view(t.shape) for t in outputs]
    total = torch.stack([(t * w).sum() for t, w in zip(outputs, weights, strict=True)]).sum()
    gradients = torch.autograd.grad(total, [parameter for _, parameter in parameters], allow_unused=True)
    return [t.detach() for t in outputs], dict(zip([name for name, _ in parameters], gradients, strict=True))


def _sum_present(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present).sum(0) if present else None


def _is_gradient_equal(name: str, expected: Tensor | None, rank_results: Sequence[_RankResult]) -> bool:
    """Return whether the gradient of a parameter on the ranks, summed or sharded, equals the expected one."""
    if name not in rank_results[0].shard_specs:
        total = _sum_present([result.gradients.get(name) for result in rank_results])
        if total is None or expected is None:
            return total is expected
        return equal_up_to_rounding(total, expected)
    for result in rank_results:
        gradient, shard_spec = result.gradients.get(name), result.shard_specs[name]
        if shard_spec.local_shape is not None and (gradient is None) != (expected is None):
            return False
        if gradient is None or expected is None:
            continue
        if not equal_up_to_rounding(gradient, shard_spec.extract(expected)):
            return False
    return True


def _different_results_error(what: str, modules: str) -> LayoutError:
    return LayoutError(
        f"with the experts of {modules} spread over ranks, the model's {what} differ.",
        cause="their forward combines several tokens (a capacity, a statistic), or takes the number of experts from "
        "something other than its parameters or an int attribute such as num_experts",
        hint="out[token] = sum over choices of weight * expert(token), and nothing else, in that "
        "forward; or leave ep out",
    )
