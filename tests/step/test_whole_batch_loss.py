"""A loss over the whole batch (contrastive) has the gradient of one process on all samples."""

import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.comm.process_group import World
from paceline.comm.rank_threads import thread_worlds
from paceline.errors import JobError
from paceline.step.loss.batch_loss import gather_rows
from paceline.torch_internals.pytree import map_tensors, tensor_leaves
from paceline.verification.reference.whole_batch import merge_microbatches, merge_with_one_attached
from tests.conftest import Shop

JOB = """
import torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl

class Pairs(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Sequential(nn.Linear(5, 8), nn.Dropout(dropout))
        self.scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, a, b):
        return {"left": F.normalize(self.left(a)), "right": F.normalize(self.right(b)), "scale": self.scale.exp()}

def loss(out, batch):
    logits = out["scale"] * out["left"] @ out["right"].T
    target = torch.arange(len(logits))
    both = F.cross_entropy(logits, target, reduction="sum") + F.cross_entropy(logits.T, target, reduction="sum")
    terms = {"pairs": (both, len(logits)), "size": (out["left"].square().mean(0).sum(), 1)}
    return terms if TERMS else terms["pairs"]

def make_job(samples: int = 31, batch: int = 12, dropout: float = 0.0):
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(samples, 6, generator=g).double(), torch.randn(samples, 5, generator=g).double()
    data = torch.utils.data.TensorDataset(a, b, torch.arange(samples))
    return pl.Job(
        model=lambda: Pairs(dropout).double(), loss=loss, loss_over="batch", train_data=data, eval_data=data, order="sequential",
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.3), global_batch_size=batch,
    )
"""


def by_hand(folder: Path, terms: bool, steps: int, samples: int = 31, batch: int = 12) -> dict[str, torch.Tensor]:
    """The plain loop of one process."""
    space: dict[str, object] = {"TERMS": terms}
    exec(JOB, space)
    job = space["make_job"](samples, batch)  # type: ignore[operator]
    from paceline.trainer.setup.build_training_setup import build_model

    model = build_model(job, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rows, position = job.train_data.tensors, 0
    for _ in range(steps):
        position = 0 if position >= samples else position
        a, b, _ = (t[position : position + batch] for t in rows)
        position += batch
        out = model(a, b)
        logits = out["scale"] * out["left"] @ out["right"].T
        target = torch.arange(len(logits))
        total = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) + (
            out["left"].square().mean(0).sum() if terms else 0.0
        )
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("ranks", "layout", "terms"),
    [
        pytest.param(1, "single", True, marks=pytest.mark.soak),
        pytest.param(2, "ddp", False, marks=pytest.mark.soak),
        (5, "ddp", True),
        (3, "threads", True),
        (3, "zero2", False),
    ],
)
def test_weights_are_those_of_a_plain_loop_over_whole_batches(shop: Shop, ranks: int, layout: str, terms: bool) -> None:
    """31 samples in batches of 12: the last batch has 7, which leaves replicas without a sample at 3 and 5 ranks."""
    from safetensors.torch import load_file

    shop.write("job.py", f"TERMS = {terms}\n" + JOB)
    ended = shop.train("run", "--layout", layout, "--eval.every", "100", ranks=ranks, steps=6)
    assert ended.code == 0, ended.text
    found = load_file(shop.path / "run" / "consolidated" / "model.safetensors")
    for name, value in by_hand(shop.path, terms, 6).items():  # float64, six steps of a smooth loss
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-13, msg=name)


@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "3", "--job.dropout", "0.2"),
        pytest.param(("--ranks", "2", "--layout", "threads"), marks=pytest.mark.soak),
    ],
)
def test_verify_finds_the_same_training(shop: Shop, words: tuple[str, ...]) -> None:
    shop.write("job.py", "TERMS = True\n" + JOB)
    ended = shop.run("verify", "job.py", *words, "--json", timeout=200)
    assert ended.code == 0 and ended.json()["verdict"] in ("bitwise", "rounding"), ended.text


def test_a_wrong_one_is_found(shop: Shop) -> None:
    planted = "\nfrom paceline.step import forward_backward as passes\npasses.gather_rows = lambda output, batch, **_: None if batch is None else (output, batch)  # only its own samples are negatives\n"
    shop.write("job.py", "TERMS = False\n" + JOB + planted)
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json", timeout=200)
    assert ended.code == 4 and ended.json()["verdict"] == "different", ended.text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--train.micro_batch_size", "3"), "does not support accumulation: 4 microbatches for 2 replicas"),
        (("--train.exact", "true"), "--train.exact is not supported"),
    ],
)
def test_what_can_not_be_is_refused(shop: Shop, words: tuple[str, ...], text: str) -> None:
    shop.write("job.py", "TERMS = False\n" + JOB)
    ended = shop.train("run", *words, steps=2)
    assert ended.code == 2 and text in ended.err, ended.text


def test_structures_are_rebuilt() -> None:
    value = {"a": torch.ones(2), "b": (torch.zeros(3), [torch.ones(1)], "text", None)}
    parts = list(tensor_leaves(value))
    assert len(parts) == 3
    again = map_tensors(value, lambda part: part + 1)
    assert again["b"][1][0].item() == 2.0 and again["b"][2:] == ("text", None)


Pair = namedtuple("Pair", ["left", "right"])
SIZES = [3, 2, 2, 0]  # samples of each replica


def gathered(
    batches: list[Any], sizes: list[int] = SIZES, output: Any = None, kinds: dict[str, bool] | None = None
) -> list[Any]:
    """What each replica has afterwards, or the error that each has; a replica in a thread."""
    worlds = thread_worlds(replicas=len(batches), world=World.alone(), timeout_seconds=30)
    found: list[Any] = [None] * len(batches)

    def run(rank: int) -> None:
        try:
            own = output if batches[rank] is not None else None
            columns = None if kinds is None else dict(kinds)
            found[rank] = gather_rows(
                own, batches[rank], world=worlds[rank], num_samples=sizes[rank], known_columns=columns
            )
        except JobError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def rows(start: int, stop: int) -> dict[str, Any]:
    """A microbatch of these samples as a collation of one's own may give it."""
    names = range(start, stop)
    return {
        "x": torch.arange(start, stop),
        "text": [f"a {n} \ud800" for n in names],
        "label": tuple(names),
        "boxes": [[(n, n + 0.1)] * n for n in names],
        "raw": [bytes([n]) for n in names],
        "scores": np.arange(start, stop, dtype=np.float32)[:, None],
        "pair": Pair([{"k": n} for n in names], torch.full((stop - start, 2), float(start))),
        "classes": ["cat", "dog", "cow", "hen"],
        "split": "train",
        "none": None,
    }


def same(found: Any, right: Any) -> bool:
    if isinstance(right, dict):
        return list(found) == list(right) and all(same(found[name], right[name]) for name in right)
    if isinstance(right, Pair):
        return type(found) is Pair and all(map(same, found, right))
    if isinstance(right, torch.Tensor | np.ndarray):
        return type(found) is type(right) and found.dtype == right.dtype and found.tolist() == right.tolist()
    return type(found) is type(right) and repr(found) == repr(right)


def test_columns_beside_tensors_are_joined_on_both_sides() -> None:
    """Where microbatches are joined in one process, and where replicas gather them, it is one batch of all samples."""
    parts, whole = [rows(0, 3), rows(3, 5), rows(5, 7)], rows(0, 7)
    whole["pair"] = Pair(whole["pair"].left, torch.tensor([0.0] * 3 + [3.0] * 2 + [5.0] * 2)[:, None].expand(7, 2))
    for batch in (
        merge_with_one_attached(parts, attached_index=1, sizes=SIZES[:3]),
        merge_microbatches(parts, SIZES[:3], lambda: None),
    ):
        assert same(batch, whole)
    found = gathered([*parts, None])
    assert found[3] is None
    assert all(output is None and same(batch, whole) for output, batch in found[:3])


DIFFERENT = [
    ("longest", 3, 2, r"batch\['longest'\] is not the same on every replica"),
    ("number", torch.tensor(3), torch.tensor(2), r"batch\['number'\] is not the same"),
    ("file", {"name": "a.tar"}, {"name": "b.tar"}, r"batch\['file'\]\['name'\] is not the same"),
    ("words", ["a", "b", "c"], ["a"], r"batch\['words'\] is not the same"),
    ("normal", torch.distributions.Normal(torch.ones(3), 1), torch.distributions.Normal(torch.ones(2), 1), "'normal'"),
    ("pairs", [["a"] * 3] * 3, [["a"] * 2] * 2, r"can't tell which dimension of batch\['pairs'\]"),
    ("objects", [{1}, {2}, {3}], [{4}, {5}], r"batch\['objects'\] holds a set"),
]


@pytest.mark.parametrize(("name", "here", "there", "said"), DIFFERENT, ids=[case[0] for case in DIFFERENT])
def test_what_can_not_be_joined_is_refused_by_name_on_every_replica(
    name: str, here: Any, there: Any, said: str
) -> None:
    batches = [{"x": torch.ones(3), name: here}, {"x": torch.ones(2), name: there}]
    for error in gathered(batches, [3, 2]):
        assert isinstance(error, JobError), error
        with pytest.raises(JobError, match=said):
            raise error


def test_a_list_that_may_be_a_constant_or_a_column_is_refused_in_the_first_batch_and_settled_by_it() -> None:
    batches = [{"x": torch.ones(2), "size": [10.0, 20.0]} for _ in range(2)]
    for error in gathered(batches, [2, 2]):
        with pytest.raises(JobError, match=r"can't tell whether batch\['size'\] is one value for the whole batch"):
            raise error
    constant, column = (gathered(batches, [2, 2], kinds={"batch['size']": kind}) for kind in (False, True))
    assert [batch["size"] for _, batch in constant] == [[10.0, 20.0]] * 2
    assert [batch["size"] for _, batch in column] == [[10.0, 20.0, 10.0, 20.0]] * 2
    kinds: dict[str, bool] = {}
    world = thread_worlds(replicas=1, world=World.alone(), timeout_seconds=30)[0]
    gather_rows(None, {"a": ["x", "y"], "b": ["z"]}, world=world, num_samples=2, known_columns=kinds)
    assert kinds == {"output": False, "batch['a']": True, "batch['b'][0]": False}


def test_a_tensor_of_another_length_is_refused_on_every_replica() -> None:
    for error in gathered([{"x": torch.ones(3)}, {"x": torch.ones(3)}], [3, 2]):
        with pytest.raises(JobError, match=r"first dimension.* came with 2 samples"):
            raise error


def test_a_temperature_is_everybodys() -> None:
    """It may differ in nothing that is known; its gradient is what is shared."""
    scale = torch.tensor(2.0, requires_grad=True)
    found = gathered([torch.ones(1), torch.ones(1)], [1, 1], output={"scale": scale})
    for output, batch in found:
        assert output["scale"].item() == 2.0 and batch.tolist() == [1.0, 1.0]
        assert torch.autograd.grad(output["scale"], scale)[0].item() == 0.5


def test_a_run_on_fewer_ranks_is_told_the_line_that_works(shop: Shop) -> None:
    shop.write("job.py", "TERMS = False\n" + JOB)
    assert shop.train("run", ranks=3, steps=2).code == 0
    ended = shop.train("run", ranks=2, steps=4)
    assert ended.code == 2 and "this run was started with microbatches of 4" in ended.err, ended.text
    assert "to do: --train.micro_batch_size 6 --allow micro_batch_size, or more ranks" in ended.err, ended.text
    ended = shop.train("run", "--train.micro_batch_size", "6", "--allow", "micro_batch_size", ranks=2, steps=4)
    assert ended.code == 0 and "done at step 4" in ended.text, ended.text
