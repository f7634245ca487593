"""Exact context parallelism: the same bits on any number of cp ranks, with a fixed number of sequence shards."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks
from paceline.config.layout import parse_layout
from paceline.config.settings import Settings, Train
from paceline.errors import LayoutError, RunError
from paceline.examples.text import GPT
from paceline.parallel.context_parallel.exact_context import ExactContextParallel
from paceline.parallel.context_parallel.ring_attention import Ring
from paceline.parallel.context_parallel.shard_threads import ShardThreads
from paceline.planner.layout.layout_checks import check_layout_settings
from paceline.planner.layout.mesh import Mesh
from paceline.torch_internals.private_api import run_backward
from tests.conftest import Shop
from tests.matrix.test_matrix import one_digest, run

SHARDS = 4
WINDOW = torch.randint(0, 256, (2, 71), generator=torch.Generator().manual_seed(1))
GRID = 2.0**40


def integer_gradients(world: World, model: nn.Module) -> tuple[list[float], list[Tensor]]:
    """Return the losses of this rank's shards, and the sums of their gradients as integers."""
    model = copy.deepcopy(model)
    context = ExactContextParallel(model=model, sequence={"0": 1}, num_shards=SHARDS, world=world)
    sums = [torch.zeros(p.shape, dtype=torch.int64) for p in model.parameters()]
    for parameter, total in zip(model.parameters(), sums, strict=True):

        def add(p: Tensor, total: Tensor = total) -> None:
            assert p.grad is not None
            total += (p.grad.double() * GRID).round().long()
            p.grad = None

        parameter.register_post_accumulate_grad_hook(add)
    shards = context.shard((WINDOW[:, :-1], WINDOW[:, 1:]))

    def forward(position: int) -> Tensor:
        own, shard = shards[position]
        with own.forward(shard):
            logits = model(shard.data[0])
        return F.cross_entropy(logits.flatten(0, 1), shard.data[1].flatten(), reduction="sum")

    def backward(position: int) -> None:
        own, shard = shards[position]
        with own.backward(shard):
            run_backward([losses[position]], [None])

    losses = context.run(forward, is_training=True, length=70)
    context.run(backward)
    return [float(loss.detach()) for loss in losses], sums


def over_ranks(ranks: int) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = GPT(32, 2, 4, 70, 0.0)
    results = run_simulated_ranks(lambda world: integer_gradients(world, model), ranks=ranks)
    losses = [loss for part, _ in results for loss in part]
    return losses, [torch.stack(parts).sum(0) for parts in zip(*(sums for _, sums in results), strict=True)]


def differs(first: tuple[list[float], list[Tensor]], second: tuple[list[float], list[Tensor]]) -> bool:
    return first[0] != second[0] or not all(map(torch.equal, first[1], second[1]))


def test_any_number_of_ranks_has_the_same_loss_terms_and_gradients() -> None:
    alone = over_ranks(1)
    assert not differs(alone, over_ranks(2))
    assert not differs(alone, over_ranks(4))


def test_keys_that_are_merged_in_the_order_of_arrival_give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, arrivals = over_ranks(1), itertools.count()
    monkeypatch.setattr(Ring, "blocks", lambda ring, owner, blocks=Ring.blocks: _in_any_order(
        [*blocks(ring, owner)], next(arrivals)
    ))  # fmt: skip
    assert differs(alone, over_ranks(2))


def _in_any_order(blocks: list[Any], number: int) -> list[Any]:
    return blocks[::-1] if number % 2 else blocks


class Remembering(nn.Module):
    """A model that stores a value in its forward and reads it after an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, ids: Tensor) -> Tensor:
        self.embedded = self.embed(ids)[:, None]
        attended = F.scaled_dot_product_attention(self.embedded, self.embedded, self.embedded, is_causal=True)
        return self.out((attended + self.embedded)[:, 0])


def test_a_value_that_is_stored_in_the_forward_is_refused() -> None:
    with pytest.raises(LayoutError, match="the forward writes to embedded of the model"):
        integer_gradients(World.alone(), Remembering())


def test_shards_that_all_wait_are_reported() -> None:
    threads = ShardThreads(num_shards=2)
    with pytest.raises(RunError, match="wait for one another"):
        threads.run(lambda _: threads.wait_until(lambda: False))
    assert threads.run(lambda shard: shard) == [0, 1], "the threads can run again"


def test_each_shard_has_its_own_generator() -> None:
    threads, drawn = ShardThreads(num_shards=2), [0, 0]

    def draw(shard: int) -> list[float]:
        numbers = []
        for _ in range(3):
            numbers.append(float(torch.rand(())))
            drawn[shard] += 1
            threads.wait_until(lambda: drawn[1 - shard] >= drawn[shard])
        return numbers

    first, second = threads.run(draw)
    assert first == second


@pytest.mark.parametrize(
    ("layout", "mesh", "train", "words"),
    [
        ("cp", Mesh(cp=2), Train(exact=True), "exact mode with cp needs --train.sequence_shards"),
        ("cp", Mesh(cp=2), Train(sequence_shards=4), "has an effect only in exact mode"),
        ("cp", Mesh(cp=3), Train(exact=True, sequence_shards=4), "can't be divided by cp=3"),
        ("tp", Mesh(tp=2), Train(exact=True, sequence_shards=4), "with --layout tp is not supported"),
        ("cp", Mesh(cp=2), Train(exact=True, sequence_shards=4, compile=True), "with --train.compile is not supported"),
    ],
)
def test_what_is_refused_before_the_start(layout: str, mesh: Mesh, train: Train, words: str) -> None:
    errors = check_layout_settings(parse_layout(layout), mesh, Settings(train=train))
    assert any(words in error.what and error.hint for error in errors), errors


WORDS = ("--exact", "--micro", "1", "--steps", "4", "--checks", "start", "final", "--sequence-shards", "4")
MODELS = ("text", "llama", "qwen3_moe", "mixtral", "gpt2", "bert")
LAYOUTS = (
    *("single:1", "ddp:2", "cp:2", "cp:4", "fsdp:2", "zero1:2", "zero2:2", "pp:2", "pp,schedule=zbv:2", "hsdp:4"),
    *("dp_replicate=2,cp=2:4", "dp_shard=2,cp=2:4", "dp_shard=2,cp=2,zero=2:4", "pp=2,cp=2:4", "cp,remat=full:2"),
    *("pp=2,cp=2,schedule=zbv:4", "pp=2,cp=2,remat=full:4", "pp=2,dp_shard=2,cp=2:8"),
)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_one_digest_on_cp_1_2_and_4_with_ddp_fsdp_and_pp(tmp_path: Path, model: str) -> None:
    answers = run(tmp_path, *WORDS, "--case", *(f"{model}:{layout}" for layout in LAYOUTS), seconds=3600)
    assert len(answers) == len(LAYOUTS)
    assert all(answer["state"] == "bitwise" for answer in answers), answers
    one_digest(answers, "final", models=(model,))


@pytest.mark.soak
def test_one_digest_with_dropout(tmp_path: Path) -> None:
    cases = [f"text:{layout}" for layout in ("single:1", "cp:2", "cp:4", "pp=2,cp=2:4")]
    answers = run(tmp_path, *WORDS, "--params", json.dumps({"dropout": 0.2}), "--case", *cases, seconds=900)
    plain = run(tmp_path, *WORDS, "--case", "text:single:1", seconds=300)
    one_digest(answers, "final", models=("text",))
    assert answers[0]["final"] != plain[0]["final"]


def test_one_digest_on_cp_1_and_2(tmp_path: Path) -> None:
    words = ["2" if word == "4" else word for word in WORDS]
    answers = run(tmp_path, *words, "--case", "text:single:1", "text:cp:2", seconds=300)
    one_digest(answers, "final", models=("text",))


COMMON = (
    *(
        "--train.exact",
        "--train.sequence_shards",
        "4",
        "--train.micro_batch_size",
        "2",
        "--train.global_batch_size",
        "4",
    ),
    *("--job.dropout", "0.1", "--job.context", "33", "--eval.every", "1000", "--eval.batch_size", "128"),
)


@pytest.mark.soak
def test_a_resume_on_other_numbers_of_cp_ranks_changes_no_bit(shop: Shop) -> None:
    assert shop.run("new", "text").code == 0

    def train(folder: str, steps: int, layout: str, ranks: int) -> None:
        ended = shop.run(
            "train", "text.py", "--run-dir", folder, "--layout", layout, "--ranks", str(ranks), "--train.steps",
            str(steps), *COMMON, timeout=400,
        )  # fmt: skip
        assert ended.code == 0, ended.text

    train("alone", 6, "single", 1)
    for steps, layout, ranks in ((2, "cp", 2), (4, "cp", 4), (6, "single", 1)):
        train("cut", steps, layout, ranks)
    digests = [json.loads((shop.path / name / "weights.json").read_text())["digest"] for name in ("alone", "cut")]
    assert digests[0] == digests[1]
    refused = shop.run(
        "train", "text.py", "--run-dir", "cut", "--ranks", "1", "--layout", "single", "--train.steps", "8", *COMMON,
        "--train.sequence_shards", "2",
    )  # fmt: skip
    assert refused.code == 2 and "sequence_shards: was 4, is 2" in refused.text
