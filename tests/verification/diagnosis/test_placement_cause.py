"""The layout of a wrong gradient tells its cause, on constructed tensors; a right gradient gives none."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.planner.layout.mesh import Mesh
from paceline.verification.diagnosis.placement_cause import GradientCase, placement_cause
from paceline.verification.diagnosis.rank_names import RankNames


class Played(ShardedTensors):
    """What the ranks hold, as given."""

    def __init__(self, parts: dict[str, list[ShardSpec]]) -> None:
        super().__init__(world=World.alone(), tensors=[])
        self._shard_specs = parts


ALL, NONE = ShardSpec.full([4, 3]), ShardSpec.empty([4, 3])
HALVES = [ShardSpec.from_ranges([4, 3], dim=0, ranges=[rows]) for rows in ((0, 2), (2, 4))]
RIGHT = {name: torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abc")}


def told(mesh: Mesh, parts: dict[str, list[ShardSpec]], copies: Sequence[dict[str, Tensor]]) -> str:
    bad = [n for n in parts if any(n not in c or not torch.equal(c[n], RIGHT[n]) for c in copies)]
    case = GradientCase(
        rank_names=RankNames(mesh=mesh, sharded=Played(parts)),
        expected={name: RIGHT[name] for name in parts},
        copies=copies,
        differing_names=bad,
        floors=dict.fromkeys(parts, 1e-6),
    )
    found = placement_cause(case)
    return "" if found is None else f"{found[0]}: {found[1]}"


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(tp=2), "a: only a part of its gradient is on each of tp ranks 0 and 1"),
        (Mesh(cp=2), "not summed over cp"),
        (Mesh(pp=2), "stages 0 and 1 (ranks 0, 1), which both hold it (tied)"),
        (Mesh(tp=2, pp=2), "tp ranks 0 and 1 (ranks 0, 1)"),
    ],
)
def test_parts_that_nobody_added(mesh: Mesh, words: str) -> None:
    own = [RIGHT["a"] * 0.3, RIGHT["a"] * 0.7] * (mesh.ranks // 2)
    found = told(mesh, {"a": [ALL] * mesh.ranks, "b": HALVES * (mesh.ranks // 2)}, [{**RIGHT, "a": v} for v in own])
    assert words in found


def test_equal_copies_are_no_parts() -> None:
    twice = {**RIGHT, "a": RIGHT["a"] * 2}
    assert told(Mesh(tp=2), {"a": [ALL, ALL], "b": HALVES}, [twice, twice]) == ""


def test_one_copy_is_right() -> None:
    copies = [RIGHT, {**RIGHT, "a": RIGHT["b"]}]
    found = told(Mesh(pp=2), {"a": [ALL, ALL], "b": [ALL, NONE], "c": [NONE, ALL]}, copies)
    assert "right on stage 0 (rank 0) but not on stage 1 (rank 1)" in found


@pytest.mark.parametrize(("by", "words"), [(1, "shifted by 1: off by one"), (-1, "shifted by -1: off by one")])
def test_rows_in_other_places(by: int, words: str) -> None:
    wrong = RIGHT["a"].clone()
    wrong[2:] = wrong[2:].roll(by, 0)
    found = told(Mesh(dp_shard=2, zero=2), {"a": HALVES, "b": HALVES}, [{**RIGHT, "a": wrong}])
    assert "shifted by 1: off by one, on rank 1" in found  # of two rows, up is down
    rolled = told(Mesh(tp=2), {"a": [ALL, ALL], "b": HALVES}, [{**RIGHT, "a": RIGHT["a"].roll(by, 0)}] * 2)
    assert words in rolled


def test_rows_that_change_places() -> None:
    wrong = {**RIGHT, "a": RIGHT["a"][[0, 2, 1, 3]]}
    assert "row 1 holds what row 2 should" in told(Mesh(tp=2), {"a": [ALL, ALL], "b": HALVES}, [wrong, wrong])


def test_a_stage_without_gradients_and_a_block_without() -> None:
    nothing = torch.zeros(4, 3)
    parts = {"x.a": [ALL, NONE], "y.b": [NONE, ALL], "y.c": [NONE, ALL]}
    RIGHT.update({"x.a": RIGHT["a"], "y.b": RIGHT["b"], "y.c": RIGHT["c"]})
    whole = told(Mesh(pp=2), parts, [{**RIGHT, "x.a": nothing}])
    assert "no parameter on stage 0 (rank 0) has a gradient" in whole
    one = told(Mesh(pp=2), parts, [{**RIGHT, "y.b": nothing}])
    assert one.startswith("y.b: y has no gradient on stage 1 (rank 1): the stage did not run it")


def test_nothing_is_said_of_what_is_right() -> None:
    assert told(Mesh(tp=2), {"a": [ALL, ALL], "b": HALVES}, [RIGHT, RIGHT]) == ""


def test_where_is_said_as_the_mesh_has_it() -> None:
    places = RankNames(mesh=Mesh(pp=2, dp_shard=2, tp=2, zero=3), sharded=Played({}))
    assert places.describe([4, 5, 6, 7], all_ranks=range(8)) == ", on stage 1 (ranks 4, 5, 6, 7)"
    assert places.describe([1, 3, 5, 7], all_ranks=range(8)) == ", on tp rank 1 (ranks 1, 3, 5, 7)"
    assert places.describe([3], all_ranks=range(8)) == ", on rank 3 (tp rank 1, dp_shard rank 1, stage 0)"
    assert places.describe(range(8), all_ranks=range(8)) == ""
    assert places.replica_name(1) == "replica 1 (ranks 2, 3, 6, 7)"
    assert RankNames(mesh=Mesh(dp_shard=2), sharded=Played({})).replica_name(1) == "rank 1"
