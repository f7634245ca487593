"""The peak memory of a deep step, extrapolated from two shallower ones, equals that of the deep step itself."""

from random import Random

import pytest

from paceline.profiling.model_tracing.memory_timeline import MemoryTimeline, extrapolate_peak, extrapolate_timeline

Amounts = dict[str, list[int]]


def drawn(seed: int) -> Amounts:
    """What operations hold: before the blocks, of one block while it runs, what a block leaves, after them."""
    draw = Random(seed)

    def some(most: int) -> list[int]:
        return [draw.randrange(1, 1000) for _ in range(draw.randrange(1, most))]

    return {"before": some(6), "block": some(9), "leaves": some(2), "after": some(6), "own": some(2)}


def journal(amounts: Amounts, blocks: int) -> MemoryTimeline:
    """Two parts: a forward, in which every block leaves something, and a backward that lets go of it."""
    found, (leaves,), (own,) = MemoryTimeline(), amounts["leaves"][:1], amounts["own"][:1]
    lies = own * blocks

    def note(kind: str, held: int) -> None:
        for place, amount in enumerate(amounts[kind]):
            found.record(f"{kind} {place}", (lies, 0, 0, 0, held + amount))

    for part in ("forward", "backward"):
        if part == "backward":
            found.start_part()
        note("before", 0 if part == "forward" else leaves * blocks)
        for block in range(blocks):
            note("block", leaves * (block if part == "forward" else blocks - block))
        note("after", leaves * blocks if part == "forward" else 0)
    return found


def most(found: MemoryTimeline) -> int:
    return max(sum(held) for part in found.parts for _, held in part)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_deep_step_holds_is_found_from_two_that_are_less_deep(seed: int) -> None:
    amounts, deep = drawn(seed), 4 + seed
    found = extrapolate_peak(journal(amounts, 4), [(journal(amounts, 5), deep - 4)])
    assert found is not None
    assert found.total == most(journal(amounts, deep))
    assert found.parameters == amounts["own"][0] * deep


@pytest.mark.parametrize("seed", range(0, 40, 5))
def test_every_operation_of_a_deep_step_is_found(seed: int) -> None:
    amounts, deep = drawn(seed), 5 + seed
    found = extrapolate_timeline(journal(amounts, 4), journal(amounts, 5), deep - 4)
    assert found == journal(amounts, deep)


@pytest.mark.parametrize("place", [2, 5, 7, 10])
def test_a_block_that_holds_more_than_its_like_is_seen(place: int) -> None:
    """Wherever it stands between the first and the last, which are replayed with all others."""
    amounts = drawn(8)

    def odd(blocks: int) -> MemoryTimeline:
        found = journal(amounts, blocks)
        before, each = len(amounts["before"]), len(amounts["block"])
        at = before + place * each
        if place < blocks - 1:
            name, held = found.parts[0][at]
            found.parts[0][at] = (name, (*held[:4], held[4] + 5000))
        return found

    assert extrapolate_timeline(odd(4), odd(5), 8) != odd(12)


def test_two_chains_grow_each_by_itself() -> None:
    """Of two in one step each gets a block more in a replay of its own."""
    few, other = drawn(1), drawn(2)

    def both(one: int, two: int) -> MemoryTimeline:
        found = MemoryTimeline()
        found.parts = [*journal(few, one).parts, *journal(other, two).parts]
        return found

    found = extrapolate_peak(both(4, 4), [(both(5, 4), 3), (both(4, 5), 6)])
    assert found is not None
    assert found.total == most(both(7, 10))


def test_steps_that_are_not_alike_are_told() -> None:
    amounts = drawn(3)
    others = {**amounts, "after": [*amounts["after"], 7]}
    assert extrapolate_peak(journal(amounts, 4), [(journal(others, 5), 3)]) is None
    longer = journal(amounts, 5)
    longer.start_part()
    longer.record("more", (0, 0, 0, 0, 0))
    assert extrapolate_peak(journal(amounts, 4), [(longer, 3)]) is None
    renamed = journal(amounts, 5)
    renamed.parts[0][-1] = ("another", renamed.parts[0][-1][1])
    assert extrapolate_peak(journal(amounts, 4), [(renamed, 3)]) is None
    assert extrapolate_peak(journal(amounts, 5), [(journal(amounts, 4), 3)]) is None, "fewer are none more"
