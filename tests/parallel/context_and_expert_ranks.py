"""Run by test_context_and_expert_processes.py: `python -m tests.parallel.context_and_expert_ranks RANKS FOLDER` forks that many gloo ranks.

Every rank plays the one process too and holds its own against it. Some cases run on groups of the world's ranks.
"""

import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.process_group import World
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.context_parallel.context_parallel_check import Float64Mode
from paceline.parallel.expert_parallel.expert_parallel import split_experts
from tests.parallel.one_process_reference import (
    BERT,
    BERT_PLAIN,
    CLOSE,
    LLAMA,
    MIXTRAL,
    Case,
    Listed,
    Mixture,
    Stacked,
    alone,
    far,
    far_experts,
    seeded,
    text,
    tokens,
    train,
    train_experts,
    transformer,
)


def sub(world: World, members: list[int]) -> World:
    """The world of some of its ranks; every rank calls it, also those outside."""
    group = dist.new_group(members)
    inside = world.rank in members
    return World(rank=members.index(world.rank) if inside else 0, world_size=len(members), backend="gloo", group=group)


def heads(*, dropout: float) -> Case:
    """torch's own layer of a transformer."""
    generator = torch.Generator().manual_seed(5)
    return Case(
        model=lambda: seeded(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)),
        batches=[torch.randn(2, 15, 16, generator=generator, dtype=torch.float64) for _ in range(2)],
        forward=lambda model, batch: model(batch),
        loss=lambda output, batch: (output[..., 0].sum(), batch.shape[0] * batch.shape[1]),
        sequence={"0": 1},
    )


def contexts(world: World) -> None:
    cases: dict[str, Case] = {
        "text": text(length=27),
        "llama": transformer(LLAMA, num_key_value_heads=2, padding="right", attention_dropout=0.3),
        "bert": transformer(BERT, padding="left", **BERT_PLAIN),
        "mixtral": transformer(MIXTRAL, num_key_value_heads=2),
        "bert with dropout": transformer(BERT, padding="left"),
        "gpt2 with dropout": transformer("GPT2LMHeadModel/GPT2Config", bos_token_id=None, eos_token_id=None),
        "heads with dropout": heads(dropout=0.2),
    }
    if world.world_size == 2:  # the others are in `make soak`, and between threads in test_context_parallel.py
        cases = {name: cases[name] for name in ("text", "llama")}
    for name, case in cases.items():
        distance = far(train(case, world), train(case, alone()))
        assert distance < CLOSE, (name, distance)


def mixtures(world: World) -> None:
    sizes = [5 + 2 * rank if rank else 0 for rank in range(world.world_size)]  # the first rank has no token
    cases = {
        "stacked": seeded(lambda: Mixture(Stacked, count=5)),
        "listed": seeded(lambda: Mixture(Listed, count=5, favour=(0, 1))),
        "mixtral": transformer(MIXTRAL, num_key_value_heads=2, num_local_experts=3).model(),
    }
    for name, model in cases.items():
        if name == "mixtral" and world.world_size == 2:
            continue
        data = tokens(*(sizes if name != "mixtral" else [size + 4 for size in sizes]))
        wanted = train_experts(model, data, None)
        distance = far_experts(model, data, train_experts(model, data, world), wanted)
        assert distance < CLOSE, (name, distance)


def product(world: World) -> None:
    """Two data ranks, each with its sequence cut over two: experts over all four, whose tokens all differ."""
    lines = [[0, 1], [2, 3]]
    cp = [sub(world, members) for members in lines][world.rank // 2]
    case = transformer(MIXTRAL, num_key_value_heads=2, lengths=(19, 14))
    whole, model = case.model().double(), case.model().double()
    parts = split_experts(model=model, world=world).shard_specs
    placed = ContextParallel(model=model, sequence=case.sequence, world=cp, is_model_loss=True)
    counted = sum((batch["labels"][:, 1:] != -100).sum() for batch in case.batches)
    for batch in case.batches:
        with Float64Mode():
            (case.loss(whole(**batch), batch)[0] / counted).backward()
    part = placed.shard(case.batches[world.rank // 2])
    mine = part.data
    with placed.forward(part), Float64Mode():
        (case.loss(model(**mine), mine)[0] / counted).backward()
    for name, parameter in model.named_parameters():
        right = dict(whole.named_parameters())[name].grad
        assert right is not None and parameter.grad is not None
        got = parameter.grad if name in parts else world.all_reduce(parameter.grad)
        wanted = parts[name].extract(right) if name in parts else right
        assert (got - wanted).abs().max() <= CLOSE * right.abs().max(), name


def faces(world: World) -> None:
    """Outputs are joined."""
    case = text(length=13)
    model, ids = case.model(), case.batches[0][0]
    placed = ContextParallel(model=model, sequence=case.sequence, world=world)
    part = placed.shard(case.batches[0])
    mine = part.data
    with torch.no_grad(), placed.forward(part):
        found = placed.gather(model(mine[0]), batch_shard=part)
    assert torch.allclose(found, model(ids), atol=1e-5)


def one_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    world = World(rank=rank, world_size=ranks, backend="gloo", group=dist.group.WORLD)
    contexts(world)
    mixtures(world)
    faces(world)
    if ranks == 4:
        product(world)
    world.barrier()
    world.close()


def main() -> int:
    ranks, folder = int(sys.argv[1]), sys.argv[2]
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                one_rank(rank, ranks, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    return int(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    import transformers  # noqa: F401  (imported once, before the ranks are forked)

    sys.exit(main())
