"""The reference for `cp` and `ep`: the same batches through the whole model in one process, in float64.

`over` is a `World`: threads of one process, or processes. One of size 1 is the one process.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks, thread_worlds
from paceline.examples.text import GPT
from paceline.examples.text import loss as text_loss
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.context_parallel.context_parallel_check import Float64Mode
from paceline.parallel.expert_parallel.expert_parallel import split_experts
from paceline.parallel.module_access.shard_spec import ShardSpec

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 96,
}  # fmt: skip
CLOSE = 1e-12
SEQUENCE = {"input_ids": 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, whole batches for some steps, and how a loss comes of them."""

    model: Callable[[], nn.Module]
    batches: Sequence[Any]
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], tuple[Tensor, Any]]
    sequence: dict[str, int]
    own_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The losses of each step, the gradients of the first and the weights after the last."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def alone() -> World:
    return thread_worlds(replicas=1)[0]


def train(case: Case, over: World, start: nn.Module | None = None) -> Trained:
    """Steps of SGD with momentum on this rank's part of every sequence. Threads share a generator, so a `start`."""
    model = copy.deepcopy(start or case.model()).double()
    placed = ContextParallel(model=model, sequence=case.sequence, world=over, is_model_loss=case.own_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, first = [], {}
    for number, batch in enumerate(case.batches):
        torch.manual_seed(number)  # every rank draws what one process draws; between threads nothing is drawn
        part = placed.shard(batch)
        mine = part.data
        with placed.forward(part), Float64Mode():
            total, count = case.loss(case.forward(model, mine), mine)
        optimizer.zero_grad()
        total.backward()
        counted = over.all_reduce(torch.tensor(float(count), dtype=torch.float64))
        losses.append(float(over.all_reduce(total.detach().clone()) / counted))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = over.all_reduce(parameter.grad.clone()) / counted
        first = first or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Trained(losses=losses, gradients=first, weights={n: p.detach() for n, p in model.named_parameters()})


def far(found: Trained, wanted: Trained) -> float:
    """The largest difference, relative to each tensor's largest value."""
    assert found.gradients.keys() == wanted.gradients.keys()
    pairs = [(torch.tensor(found.losses), torch.tensor(wanted.losses))]
    pairs += [(found.gradients[n], wanted.gradients[n]) for n in wanted.gradients]
    pairs += [(found.weights[n], wanted.weights[n]) for n in wanted.weights]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


def assert_context(case: Case, *, ranks: int) -> None:
    """Every rank's training is the one process's."""
    assert distance_context(case, ranks=ranks) < CLOSE


def distance_context(case: Case, *, ranks: int) -> float:
    """The largest difference of any rank's training to one process's."""
    start = case.model()
    wanted = train(case, alone(), start)
    return max(far(found, wanted) for found in run_simulated_ranks(lambda over: train(case, over, start), ranks=ranks))


# -- models


def text(*, length: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(0, 256, (2, length + 1), generator=generator) for _ in range(3)]
    return Case(
        model=lambda: seeded(lambda: GPT(32, 2, 4, 64, 0.0)),
        batches=[(w[:, :-1], w[:, 1:]) for w in windows],
        forward=lambda model, batch: model(batch[0]),
        loss=text_loss,
        sequence={"0": 1},
    )


def transformer(name: str, *, lengths: Sequence[int] = (21, 16, 9), padding: str = "", **settings: Any) -> Case:
    """An unmodified model from its config, with the loss that it computes itself."""
    import transformers

    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in lengths:
        ids = torch.randint(0, 64, (2, length), generator=generator)
        labels = ids.clone()
        labels[0, length // 3] = -100
        batch = {"input_ids": ids, "labels": labels}
        if padding:
            mask = torch.ones_like(ids)
            hidden = slice(0, 4) if padding == "left" else slice(length - 4, length)
            mask[0, hidden] = 0
            labels[0, hidden] = -100
            batch["attention_mask"] = mask
        batches.append(batch)
    model_class, config_class = (getattr(transformers, part) for part in name.split("/"))
    causal = "CausalLM" in name or "LMHead" in name

    def loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        whole = labels.shape[1] in lengths
        count = ((labels[:, 1:] if causal and whole else labels) != -100).sum()
        return output.loss * count, count

    return Case(
        model=lambda: seeded(lambda: eager_experts(model_class(config_class(**{**SMALL, **settings})))),
        batches=batches,
        forward=lambda model, batch: model(**batch),
        loss=loss,
        sequence=SEQUENCE,
        own_loss=True,
    )


LLAMA = "LlamaForCausalLM/LlamaConfig"
BERT = "BertForMaskedLM/BertConfig"
MIXTRAL = "MixtralForCausalLM/MixtralConfig"
BERT_PLAIN = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def eager_experts(model: nn.Module) -> nn.Module:
    """torch's grouped product has no float64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


# -- experts


class Stacked(nn.Module):
    """Experts of one's own, stacked: a product and a bias each."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(count, width))

    def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(expert_index == expert)
            found = F.gelu(tokens[token] @ self.weight[expert] + self.bias[expert])
            out = out.index_add(0, token, found * expert_weight[token, choice, None])
        return out


class Listed(nn.Module):
    """Experts of one's own, each a module; one that no token chose is not called."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))

    def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(expert_index == number)
            if len(token):
                out = out.index_add(0, token, expert(tokens[token]) * expert_weight[token, choice, None])
        return out


class Mixture(nn.Module):
    """An embedding, a router with a load-balancing term, experts, a head. `favour` sends every token to some experts."""

    def __init__(self, kind: type[nn.Module], *, count: int, choices: int = 2, favour: Sequence[int] = ()) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(64, 16), nn.Linear(16, count)
        self.moe, self.head = kind(count, 16), nn.Linear(16, 64)
        self.choices, self.favour = choices, tuple(favour)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids).flatten(0, 1)
        scores = self.router(x)
        pushed = scores.detach().clone()
        pushed[:, list(self.favour)] += 100.0
        index = pushed.topk(self.choices, -1).indices
        weight = scores.gather(-1, index).softmax(-1)
        x = x + self.moe(x, index, weight)
        return self.head(x).view(*ids.shape, 64), scores.logsumexp(-1).square().sum()


def train_experts(
    model: nn.Module, data: Sequence[Sequence[Any]], over: World | None, *, twice: bool = False
) -> tuple[dict[str, Tensor | None], dict[str, Tensor], dict[str, ShardSpec]]:
    """Steps over `data` (a list of rank batches a step): all of them in one process without `over`, else one's own.

    Gives the gradients of the first step, the weights after the last and the parts. `twice` plants a fault.
    """
    model = copy.deepcopy(model).double()
    parts: dict[str, ShardSpec] = {}
    if over is not None:
        parts = dict(split_experts(model=model, world=over).shard_specs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first: dict[str, Tensor | None] = {}
    for batches in data:
        optimizer.zero_grad()
        count = torch.zeros((), dtype=torch.float64)
        for ids in batches if over is None else [batches[over.rank]]:
            with Float64Mode():
                total, number = objective(model, ids)
            total.backward()
            count = count + number
        count = count if over is None else over.all_reduce(count.clone())
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            shared = over is not None and (twice or name not in parts)
            grad = over.all_reduce(parameter.grad.clone()) if over is not None and shared else parameter.grad
            parameter.grad = grad / count
        first = first or {n: p.grad for n, p in model.named_parameters()}
        optimizer.step()
    return first, {n: p.detach() for n, p in model.named_parameters()}, parts


def objective(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
    output = model(ids)
    logits, term = output if isinstance(output, tuple) else (output.logits, 0.0)
    weights = torch.linspace(-1, 1, 64, dtype=logits.dtype)
    return (logits.log_softmax(-1) * weights).sum() + 0.01 * term, ids.numel()


def far_experts(model: nn.Module, data: Sequence[Sequence[Any]], found: Any, wanted: Any) -> float:
    """The largest difference of this rank's gradients and weights to the same parts of one process's."""
    worst = 0.0
    gradients, weights, parts = found
    for got, right in ((gradients, wanted[0]), (weights, wanted[1])):
        for name, whole in right.items():
            part = parts.get(name, ShardSpec.full(() if whole is None else whole.shape))
            if part.local_shape is None:
                assert name not in got
                continue
            mine = got[name]
            assert (mine is None) == (whole is None), name
            if mine is not None and mine.numel():
                worst = max(worst, float((mine - part.extract(whole)).abs().max() / whole.abs().max().clamp(min=1e-3)))
    return worst


def assert_experts(model: nn.Module, data: Sequence[Sequence[Any]], *, ranks: int) -> None:
    assert distance_experts(model, data, ranks=ranks) < CLOSE


def distance_experts(model: nn.Module, data: Sequence[Sequence[Any]], *, ranks: int, twice: bool = False) -> float:
    """The largest difference of any rank's gradients and weights to one process's."""
    wanted = train_experts(model, data, None)
    every = run_simulated_ranks(lambda over: train_experts(model, data, over, twice=twice), ranks=ranks)
    return max(far_experts(model, data, found, wanted) for found in every)


def tokens(*sizes: int, steps: int = 3) -> list[list[Tensor]]:
    """For each step, a batch of each size: one a rank."""
    generator = torch.Generator().manual_seed(2)
    return [[torch.randint(0, 64, (1, size), generator=generator) for size in sizes] for _ in range(steps)]
