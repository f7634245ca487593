"""zero1, zero2, fsdp and hsdp on real processes give one process's weights, bit for bit in exact mode.

The model is tied, with a frozen parameter, one without a gradient, one that some microbatches use, a scalar, a single
row and shards without a row; batches have unequal microbatches, and replicas that stand in. The clip bites.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.parallel.sharding.fsdp_options import FullShardOptions
from paceline.parallel.sharding.units import UnitChoice
from tests.parallel.sharding import sharding_ranks
from tests.parallel.sharding.sharding_ranks import CLIP, Case, alone, plain, run, together

pytestmark = pytest.mark.one_worker  # what they share is made once

LAYOUTS = ("zero1", "zero2", "fsdp")
DAILY = [
    *(Case(layout=layout, exact=exact) for layout in LAYOUTS for exact in (False, True)),
    Case(layout="fsdp", model="llama"),
    Case(layout="zero2", model="llama", exact=True),
    Case(layout="fsdp", model="llama", exact=True),
    Case(layout="zero1", optimizer="muon", exact=True),
    Case(layout="zero2", optimizer="muon"),
    Case(layout="zero1", optimizer="adafactor"),
    Case(layout="fsdp", optimizer="adagrad", asked=FullShardOptions(offload=True), offload_state=True),
    Case(layout="fsdp", optimizer="momentum", asked=FullShardOptions(reshard=False, units=UnitChoice(min_numel=30))),
    Case(layout="fsdp", exact=True, autocast=True, remat=True, asked=FullShardOptions(prefetch=1)),
]
FEW = [case for case in DAILY if case.model == "gpt" and case.optimizer == "adamw" and not case.autocast]
SOAK = [
    Case(layout=layout, model=model, optimizer=optimizer, exact=exact)
    for layout, model, optimizer, exact in itertools.product(
        LAYOUTS, ("gpt", "llama"), ("adamw", "momentum", "adagrad"), (False, True)
    )
]

FAULTS = [
    Case(layout="zero1", fault="not spread"),
    Case(layout="zero2", fault="not spread"),
    Case(layout="fsdp", fault="not spread"),
    Case(layout="zero2", fault="rows left out"),
    Case(layout="fsdp", fault="only the last microbatch"),
    Case(layout="fsdp", fault="norm of own rows"),
    Case(layout="zero2", fault="a stand-in counts"),
    Case(layout="fsdp", exact=True, fault="a stand-in counts"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[Case, list[Any]]]:
    @cache
    def answers(ranks: int, replicate: int, which: str) -> dict[Case, list[Any]]:
        chosen = {"daily": [*DAILY, *FAULTS], "few": FEW, "soak": SOAK}[which]
        cases = [_with(case, replicate=replicate) for case in chosen]
        return dict(zip(chosen, run(cases, ranks=ranks, folder=tmp_path_factory.mktemp("ranks")), strict=True))

    return answers


@pytest.fixture(scope="module")
def in_small_buckets(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Any]]:
    cases = [_with(case, replicate=2) for case in FEW]
    answers = run(cases, ranks=4, folder=tmp_path_factory.mktemp("small"), work=sharding_ranks.train_in_small_buckets)
    return dict(zip(FEW, answers, strict=True))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have it: the number of threads changes bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _with(case: Case, **changes: Any) -> Case:
    return Case(**{**vars(case), **changes})


@cache
def _reference(model: str, optimizer: str, exact: bool, autocast: bool, remat: bool) -> dict[str, dict[str, Tensor]]:
    case = Case(layout="single", model=model, optimizer=optimizer, exact=exact, autocast=autocast, remat=remat)
    return alone(case) if exact else plain(case)


def check(case: Case, answers: list[Any]) -> None:
    """Weights, gradients and norms are one process's."""
    for answer in answers:
        assert "error" not in answer, answer["trace"]
    right = _reference(case.model, case.optimizer, case.exact, case.autocast, case.remat)
    for kind in ("weights", "gradients"):
        found = together([answer[kind] for answer in answers])
        assert set(found) == set(right[kind])
        for name, value in right[kind].items():
            _equal(case, found[name], value, f"{kind} {name}")
    for answer in answers:
        _equal(case, answer["norms"], right["norms"]["all"], "norm")
    assert float(right["norms"]["all"].min()) > CLIP


def _equal(case: Case, found: Tensor, right: Tensor, what: str) -> None:
    if case.exact:
        assert torch.equal(found, right), f"{what}: {(found - right).abs().max()}"
    else:
        assert torch.allclose(found, right.to(found.dtype), rtol=0, atol=1e-12), (
            f"{what}: {(found - right).abs().max()}"
        )


@pytest.mark.parametrize("case", DAILY, ids=str)
def test_it_is_the_training_of_one_process(trained: Any, case: Case) -> None:
    check(case, trained(2, 1, "daily")[case])


@pytest.mark.parametrize("case", FEW, ids=str)
def test_with_shards_of_no_row_too(trained: Any, case: Case) -> None:
    check(case, trained(3, 1, "few")[case])


@pytest.mark.soak
@pytest.mark.parametrize("case", SOAK, ids=str)
@pytest.mark.parametrize(("ranks", "replicate"), [(2, 1), (3, 1), (4, 1), (4, 2), (2, 2)])
def test_every_layout_is_the_training_of_one_process(trained: Any, case: Case, ranks: int, replicate: int) -> None:
    check(case, trained(ranks, replicate, "soak")[case])


@pytest.mark.soak
@pytest.mark.parametrize("case", DAILY, ids=str)
@pytest.mark.parametrize(("ranks", "replicate"), [(3, 1), (4, 1), (4, 2)])
def test_and_so_are_replicas_of_shards(trained: Any, case: Case, ranks: int, replicate: int) -> None:
    check(case, trained(ranks, replicate, "daily")[case])


@pytest.mark.parametrize("case", FEW, ids=str)
def test_several_buckets_on_two_replicas_of_two_shards(in_small_buckets: dict[Case, list[Any]], case: Case) -> None:
    """Of each step two buckets are under way at once, some parameters travel alone, and replicas add up what is left."""
    check(case, in_small_buckets[case])


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_planted_mistake_is_seen(trained: Any, case: Case) -> None:
    with pytest.raises(AssertionError, match=r"weights|gradients|norm"):
        check(case, trained(2, 1, "daily")[case])


@pytest.mark.soak
def test_replicas_that_are_not_added_are_seen(tmp_path: Path) -> None:
    case = Case(layout="fsdp", replicate=2, fault="replicas not added")
    (answers,) = run([case], ranks=4, folder=tmp_path)
    with pytest.raises(AssertionError, match=r"weights|gradients|norm"):
        check(case, answers)
