"""Groups of ranks that exchange most stay inside a node, or the order of the ranks is refused."""

import pytest

from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.rank_placement import refuse_scattered_ranks

BLOCK, CYCLIC = ("a", "a", "b", "b"), ("a", "b", "a", "b")


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        (Mesh(tp=2, dp_replicate=2), "ranks 0, 1, a group of tp, are on a, b"),
        (Mesh(cp=2, dp_shard=2), "a group of cp"),
        (Mesh(dp_replicate=2, dp_shard=2, zero=3), "a group of dp_shard"),
    ],
)
def test_ranks_that_are_dealt_out_in_turn_are_refused(mesh: Mesh, says: str) -> None:
    assert refuse_scattered_ranks(mesh, BLOCK) == []
    [error] = refuse_scattered_ranks(mesh, CYCLIC)
    assert says in str(error) and "srun --distribution=block" in str(error)


@pytest.mark.parametrize(
    "mesh", [Mesh(dp_replicate=4), Mesh(dp_shard=4, zero=3), Mesh(pp=2, dp_replicate=2), Mesh(tp=4)]
)
def test_an_order_that_costs_nothing_is_accepted(mesh: Mesh) -> None:
    """In pp x dp, the stages exchange least; tp=4 uses both nodes in any order."""
    assert refuse_scattered_ranks(mesh, CYCLIC) == []


def test_uneven_nodes_and_unknown_hosts_are_no_reason() -> None:
    assert refuse_scattered_ranks(Mesh(tp=2, dp_replicate=2), ("a", "a", "a", "b")) == []
    assert refuse_scattered_ranks(Mesh(tp=2, dp_replicate=2), ()) == []
