"""The memory of each rank under each ZeRO stage equals the formula to the byte, measured on live storages."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.process_group import World
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.sharding.sharded_model import DataGroups, shard_zero12
from tests.parallel.sharding.sharding_ranks import (
    OPTIMIZERS,
    Case,
    batches,
    build,
    held,
    loss_of,
    run,
    try_optimizer_factory,
)

CASES = [Case(layout=layout, exact=exact, steps=2) for layout in ("zero1", "zero2", "fsdp") for exact in (False, True)]


def formula(case: Case, *, rank: int, ranks: int) -> dict[str, int]:
    """AdamW holds two numbers an element. A rank's rows begin at rank * ceil(rows / ranks)."""
    size = 4 if case.exact else 8
    every = [(tuple(p.shape), p.requires_grad, name) for name, p in build(case).named_parameters()]
    moved = [shape for shape, trains, name in every if trains and name != "unused"]

    def rows(shape: tuple[int, ...]) -> int:
        return shape[0] if shape else 1

    def per_row(shape: tuple[int, ...]) -> int:
        found = 1
        for n in shape[1:]:
            found *= n
        return found

    def own(shape: tuple[int, ...]) -> int:
        each = -(-rows(shape) // ranks)
        return max(0, min(each, rows(shape) - rank * each)) * per_row(shape)

    def whole(shape: tuple[int, ...]) -> int:
        return rows(shape) * per_row(shape)

    def padded(shape: tuple[int, ...]) -> int:
        return -(-rows(shape) // ranks) * per_row(shape)

    used = int(batches(case)[-1][0][0, 0]) % 2  # by the last step, which has one microbatch
    last = [shape for shape, trains, name in every if trains and name not in ("unused", "" if used else "sometimes")]
    trained = [shape for shape, trains, _ in every if trains]
    parameters = sum((padded if case.layout == "fsdp" else whole)(shape) for shape, _, _ in every)
    if case.layout == "zero1":  # all of one buffer, with a flag a parameter where sums are floats
        gradients = sum(map(whole, last)) if case.exact else sum(map(whole, trained)) + len(trained)
    else:  # rows of all share a buffer where sums are floats
        gradients = sum(map(own, last)) if case.exact else sum(map(own, trained))
    return {
        "parameters": parameters * size,
        "gradients": gradients * size,
        "optimizer": 2 * sum(map(own, moved)) * size,
    }


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
def test_bytes_are_the_formula(tmp_path: Path, ranks: int) -> None:
    found = run(CASES, ranks=ranks, folder=tmp_path)
    for case, answers in zip(CASES, found, strict=True):
        for rank, answer in enumerate(answers):
            assert "error" not in answer, answer["trace"]
            assert answer["bytes"] == formula(case, rank=rank, ranks=ranks), f"{case} rank {rank}"


def test_a_tensor_held_too_many_is_seen() -> None:
    """One process: a second copy of a gradient that a share keeps makes the count differ."""
    case = Case(layout="zero2", exact=True)
    model: Any = build(case)
    named = trainable_parameters(model)
    alone = DataGroups(all_ranks=World.alone(), shard_world=World.alone())
    grid = FixedPointGrid(names=[member.name for member in named])
    rules = try_optimizer_factory(OPTIMIZERS["adamw"], named)
    sharded = shard_zero12(stage=2, model=model, named_parameters=named, data_groups=alone, grid=grid)
    optimizers = rules.make_optimizers(sharded.row_shards)
    for micro in batches(case):
        for _ in range(4):
            sharded.reducer.begin()
            for ids in micro:
                total, _ = loss_of(model, ids)
                sharded.reducer.before_backward(last=True)
                total.backward()
                sharded.reducer.after_backward()
            if sharded.reducer.finish(divisor=1.0):
                break
        for optimizer in optimizers:
            optimizer.step()
    assert held(model, sharded, optimizers) == formula(case, rank=0, ranks=1)
    model.scale.grad = torch.ones(())
    assert held(model, sharded, optimizers) != formula(case, rank=0, ranks=1)
    sharded.reducer.close()
