"""Logical shards: the same bits for any number of ranks that holds them, in sums, losses and whole models."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks
from paceline.parallel.tensor_parallel.auto_plan import derive_plan
from paceline.parallel.tensor_parallel.logical.logical_group import LogicalGroup, add_pairwise
from paceline.parallel.tensor_parallel.logical.logical_shards import LogicalShards
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor
from paceline.parallel.tensor_parallel.sharding import shard_evenly
from paceline.parallel.tensor_parallel.tensor_parallel import split_model
from tests.parallel.tensor_parallel import tensor_parallel_models as models

SHARDS = 8


def on_ranks(work: Any, ranks: int, *, shards: int = SHARDS) -> list[Any]:
    """`work` on each rank of a group of logical ranks, each process of which is a thread."""
    return run_simulated_ranks(lambda world: work(LogicalGroup(world, size=shards)), ranks=ranks)


def of_ranks(terms: list[Tensor], group: LogicalGroup) -> LogicalShards:
    return LogicalShards.from_shards([terms[rank] for rank in group.local_ranks])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_one_tree_for_any_number_of_ranks(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [(torch.randn(1000, generator=generator) * 10.0 ** (n % 4)).to(dtype) for n in range(SHARDS)]
    a, b, c, d, e, f, g, h = terms
    expected = ((a + b) + (c + d)) + ((e + f) + (g + h))
    assert not torch.equal(expected, sum(terms[1:], terms[0]))  # another order gives other bits
    for ranks in (1, 2, 4, 8):
        for total in on_ranks(lambda group: group.all_reduce(of_ranks(terms, group)), ranks):
            assert torch.equal(total, expected), ranks
    assert torch.equal(add_pairwise(terms), expected)


def test_terms_are_not_changed_by_their_sum() -> None:
    terms = [torch.full((3,), float(n)) for n in range(4)]
    add_pairwise(terms)
    assert [float(term[0]) for term in terms] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("size", [16, 53])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shards_of_equal_and_unequal_size_are_gathered(size: int, ranks: int) -> None:
    full, sharding = torch.randn(3, size), shard_evenly(size, ranks=SHARDS, dim=1)

    def gather(group: LogicalGroup) -> Tensor:
        return group.all_gather(group.take_shards(full, sharding), sharding)

    assert all(torch.equal(found, full) for found in on_ranks(gather, ranks))


@pytest.mark.parametrize("loss", ["cross_entropy", "smooth", "soft", "log_softmax"])
def test_losses_over_a_split_vocabulary_equal_those_of_torch(loss: str) -> None:
    generator = torch.Generator().manual_seed(1)
    full = torch.randn(6, 53, generator=generator, dtype=torch.float64)
    target = torch.tensor([0, 52, 7, -100, 30, 14])
    soft = torch.rand(6, 53, generator=generator, dtype=torch.float64)
    sharding = shard_evenly(53, ranks=SHARDS, dim=1)

    def compute(logits: Any) -> Tensor:
        if loss == "log_softmax":
            return F.nll_loss(F.log_softmax(logits, -1), target)
        found: Tensor = F.cross_entropy(
            logits, soft if loss == "soft" else target, label_smoothing=0.1 if loss == "smooth" else 0.0
        )
        return found

    whole = full.clone().requires_grad_()
    compute(whole).backward()

    def on_rank(group: LogicalGroup) -> tuple[Tensor, list[Tensor]]:
        shards = [shard.clone().requires_grad_() for shard in group.take_shards(full, sharding).shards]
        value = compute(ShardPropagatingTensor.from_local(LogicalShards.from_shards(shards), sharding, group))
        value.backward()
        return value.detach(), [shard.grad for shard in shards if shard.grad is not None]

    values, gradients = [], []
    for ranks in (1, 2, 4):
        found = on_ranks(on_rank, ranks)
        values += [value for value, _ in found]
        gradients.append(torch.cat([grad for _, grads in found for grad in grads], 1))
    assert all(torch.equal(value, values[0]) for value in values)
    assert all(torch.equal(grad, gradients[0]) for grad in gradients)
    assert torch.allclose(values[0], compute(full)) and whole.grad is not None
    assert torch.allclose(gradients[0], whole.grad, atol=1e-15)


def trained(model: nn.Module, run: models.Run, *, ranks: int, shards: int) -> tuple[list[models.Trained], Any]:
    """Three steps with logical shards; the assembled weights."""
    plan = derive_plan(copy.deepcopy(model), run=run, ranks=shards)

    def work(world: World) -> models.Trained:
        mine = copy.deepcopy(model)
        placed = split_model(mine, plan=plan, world=world, logical_shards=shards)
        found = models.train(mine, run)
        found.parts = placed.shard_specs
        placed.close()
        return found

    found = run_simulated_ranks(work, ranks=ranks)
    return found, models.assembled(found, "weights", dict(model.named_parameters()))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_has_the_same_bits_on_one_and_two_ranks(kind: str) -> None:
    model = models.hugging_face(kind)
    (alone, *_), weights = trained(model, models.text_run, ranks=1, shards=4)
    both, others = trained(model, models.text_run, ranks=2, shards=4)
    assert {float(rank.loss) for rank in both} == {float(alone.loss)}
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
    plain = models.train(copy.deepcopy(model), models.text_run)
    assert abs(plain.loss - alone.loss) < 1e-5
    far = {name: models.relative(weights[name], plain.weights[name]) for name in weights}
    assert max(far.values()) < 1e-2, far


def test_the_bits_depend_on_the_number_of_logical_shards() -> None:
    model = models.hugging_face("llama")
    two, four = (trained(model, models.text_run, ranks=1, shards=shards)[1] for shards in (2, 4))
    assert any(not torch.equal(two[name], four[name]) for name in two)


def test_what_writes_in_place_changes_every_shard() -> None:
    shards = LogicalShards.from_shards([torch.ones(2), torch.ones(2)])
    assert shards.mul_(3.0) is shards and shards.relu_() is shards
    assert [shard.tolist() for shard in shards.shards] == [[3.0, 3.0]] * 2
    parts = torch.split(shards, 1)
    assert [len(part.shards) for part in parts if isinstance(part, LogicalShards)] == [2, 2]
