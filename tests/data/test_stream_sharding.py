"""Sharded streams have one order for any number of replicas and workers and give each sample once after any stop."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import pytest
import torch

from paceline.data.loader import read_eval_microbatches
from paceline.data.order.cursor import Cursor
from paceline.data.order.virtual_shards import choose_shards, samples_per_shard
from paceline.data.stream.dataset_state_json import NotJsonConvertible, from_json, to_json
from paceline.errors import DataError, JobError, ResumeError, UsageError
from tests.data.stream_replicas import Buffered, Files, Remembered, joined, naive_order, read_together

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
LENGTHS = [40, 23, 31, 0, 52, 17, 9]


def in_order(found: dict[Any, Any]) -> list[list[int]]:
    steps: dict[int, list[int]] = {}
    for (step, _), (_, values) in sorted(found.items()):
        steps.setdefault(step, []).extend(values)
    return [steps[step] for step in sorted(steps)]


@pytest.mark.parametrize("kind", [Files, Buffered])
@pytest.mark.parametrize(("replicas", "micro"), [(1, 12), (2, 6), (3, 4), (5, 3), (8, 2), (3, 5)])
def test_any_number_of_replicas_has_the_naive_order(kind: Any, replicas: int, micro: int) -> None:
    found = read_together(lambda: kind(LENGTHS), replicas=replicas, steps=34, micro=micro)
    shards = [[int(v) for v in kind(LENGTHS).shard(num_shards=7, index=k)] for k in range(7)]
    first = naive_order(shards, 12)
    assert in_order(joined(found))[: len(first)] == first
    assert sorted(v for batch in first for v in batch) == sorted(v for shard in shards for v in shard)
    second = in_order(joined(found))[len(first) : 2 * len(first)]
    assert sorted(v - 100_000 for batch in second for v in batch) == sorted(v for b in first for v in b)


@pytest.mark.parametrize("workers", [1, 4])
def test_data_workers_change_nothing(workers: int) -> None:
    alone = read_together(lambda: Drawing(LENGTHS), replicas=1, steps=20)
    drawn = {(v % 1_000_000 // 1000, v // 1_000_000) for _, values in joined(alone).values() for v in values}
    assert len(drawn) > 3 * len({file for file, _ in drawn})
    assert joined(read_together(lambda: Drawing(LENGTHS), replicas=1, steps=20, workers=workers)) == joined(alone)
    two = joined(read_together(lambda: Buffered(LENGTHS), replicas=2, steps=20, workers=workers))
    assert two == joined(read_together(lambda: Buffered(LENGTHS), replicas=1, steps=20))


class Drawing(Files):
    """Augmentation by the global generators, with a worker's split that must not happen."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for value in super().__iter__():
            if info is None:
                yield value + random.randrange(7) * 1_000_000


def test_a_sample_of_a_stream_has_another_random_number_in_each_epoch() -> None:
    drawn: list[dict[int, int]] = [{}, {}]
    for _, values in joined(read_together(lambda: Drawing(LENGTHS), replicas=1, steps=30)).values():
        for value in values:
            drawn[value // 100_000 % 10][value % 100_000] = value // 1_000_000
    first, second = drawn
    assert first.keys() == second.keys() and len(first) == sum(LENGTHS)
    assert sum(first[sample] == second[sample] for sample in first) < len(first) / 2  # by chance a seventh


@pytest.mark.parametrize("kind", [Files, Buffered, Remembered])
def test_a_resume_anywhere_on_any_number_goes_on(kind: Any) -> None:
    whole = joined(read_together(lambda: kind(LENGTHS), replicas=1, steps=34, micro=4))
    rng = random.Random(5)
    for stop in (1, 4, 9, 14, 15, 17, 29):
        before = read_together(lambda: kind(LENGTHS), replicas=rng.choice([1, 2, 3, 4]), steps=stop, micro=4)
        state = json.loads(json.dumps(before[0].state))
        assert all(told.state == state for told in before)
        rest = read_together(
            lambda: kind(LENGTHS), replicas=rng.choice([1, 2, 3, 4]), steps=34 - stop, micro=4,
            cursor=before[0].cursor, state=state, workers=stop % 2,
        )  # fmt: skip
        assert joined(rest) == {place: row for place, row in whole.items() if place[0] > stop}


def test_a_resume_reads_a_constant_number_of_samples_and_each_replica_its_own_shards() -> None:
    data = [Files([5000] * 8, spread=10_000) for _ in range(2)]
    turn = iter(data)
    before = read_together(lambda: next(turn), replicas=2, steps=600, batch=32, micro=16)
    assert max(len(one.reads) for one in data) < 600 * 16 + 500
    own = [{number // 10_000 for number in one.reads[100:]} for one in data]
    assert own == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    again = [Files([5000] * 8, spread=10_000) for _ in range(4)]
    turn = iter(again)
    state, cursor = before[0].state, before[0].cursor
    read_together(lambda: next(turn), replicas=4, steps=1, batch=32, micro=8, cursor=cursor, state=state)
    assert max(len(one.reads) for one in again) < 200


def test_a_shard_that_ends_changes_hands_without_being_read_again() -> None:
    data = [Files([400, 900, 900, 500], spread=10_000) for _ in range(2)]
    turn = iter(data)
    read_together(lambda: next(turn), replicas=2, steps=2700 // 12, micro=6)
    assert sum(len(one.reads) for one in data) < 2700 * 1.35


def test_a_state_without_its_buffer_is_seen_and_read_again_exactly() -> None:
    before = read_together(lambda: Buffered([90, 80]), replicas=2, steps=9)
    after = read_together(
        lambda: Buffered([90, 80]), replicas=1, steps=1, cursor=before[0].cursor, state=before[0].state
    )
    assert any("shuffle buffer" in note for note in after[0].notes)
    kept = read_together(lambda: Remembered([90, 80]), replicas=2, steps=9)
    after = read_together(lambda: Remembered([90, 80]), replicas=1, steps=1, cursor=kept[0].cursor, state=kept[0].state)
    assert not any("shuffle buffer" in note for note in after[0].notes)


def test_a_stream_that_differs_is_refused() -> None:
    before = read_together(lambda: Files([90, 80]), replicas=2, steps=9)
    with pytest.raises(DataError, match="differs from the samples that this run has read"):
        read_together(
            lambda: Files([90, 80], spread=999), replicas=1, steps=1, cursor=before[0].cursor, state=before[0].state
        )
    numbers = iter((1000, 999))
    with pytest.raises(DataError, match="gives different samples on rank 1 and rank 0"):
        read_together(lambda: Files([90, 80], spread=next(numbers)), replicas=2, steps=9, micro=6)

    class Same(Files):
        def shard(self, num_shards: int, index: int) -> Files:
            return super().shard(num_shards=num_shards, index=0)

    with pytest.raises(DataError, match="start with the same"):
        read_together(lambda: Same([90, 80]), replicas=2, steps=9)


def test_what_can_not_be_split_is_read_whole_and_it_is_said() -> None:
    class Bare(Files):
        state_dict = property()  # type: ignore[assignment]

    for data, shards, word in (
        (Bare([40, 40]), None, "it has no state_dict()"),
        (Files([40, 40]), 3, "it has 2 shards and data.shards is 3"),
        (Files([80]), None, "it has one shard"),
        (Files([40, 40]), 1, "data.shards is 1"),
    ):
        found = read_together(lambda data=data: data.shard(1, 0), replicas=1, steps=7, shards=shards)  # type: ignore[misc]
        assert in_order(joined(found)) == naive_order([[int(v) for v in data.shard(1, 0)]], 12)
        assert any(word in note and "every replica reads all" in note for note in found[0].notes), found[0].notes


def test_the_number_of_shards_is_the_runs() -> None:
    assert choose_shards(requested=None, num_real=100, global_batch_size=64) == 16
    assert choose_shards(requested=None, num_real=5, global_batch_size=64) == 5
    assert choose_shards(requested=None, num_real=None, global_batch_size=6) == 6
    with pytest.raises(UsageError, match="expected 1 to 12"):
        read_together(lambda: Files([9] * 20), replicas=1, steps=1, shards=13)
    before = read_together(lambda: Files([90] * 8), replicas=2, steps=9, shards=4)
    state, cursor = before[0].state, before[0].cursor
    after = read_together(lambda: Files([90] * 8), replicas=1, steps=9, cursor=cursor, state=state)
    assert any("4 virtual shards" in note for note in after[0].notes) or after[0].state["shards"] == 4
    with pytest.raises(ResumeError, match="was 4, is 2"):
        read_together(lambda: Files([90] * 8), replicas=1, steps=9, cursor=cursor, state=state, shards=2)
    with pytest.raises(ResumeError, match="can't be split now"):
        read_together(lambda: Files([900]), replicas=1, steps=9, cursor=cursor, state=state)


def test_the_last_batch_may_be_left_out() -> None:
    found = in_order(joined(read_together(lambda: Files([30, 40]), replicas=2, steps=8, drop_last=True)))
    assert [len(batch) for batch in found] == [12] * 8 and min(found[5]) >= 100_000 > max(found[4])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_sample_is_named_and_not_before_its_turn(workers: int) -> None:
    class Bad(Files):
        def value(self, number: int) -> Any:
            if number == 1030:
                raise KeyError("no label")
            return super().value(number)

    assert len(in_order(joined(read_together(lambda: Bad([90, 80]), replicas=2, steps=3, workers=workers)))) == 3
    with pytest.raises(DataError, match=r"reading sample 30 of shard 1 of the stream failed: KeyError") as caught:
        read_together(lambda: Bad([90, 80]), replicas=2, steps=9, workers=workers)
    assert "raise KeyError" in caught.value.where


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_each_sample_once_in_the_same_microbatches(workers: int) -> None:
    wanted = None
    for replicas in (1, 2, 3, 9, 20):
        rows = [
            part.data.tolist()
            for replica in range(replicas)
            for part in read_eval_microbatches(
                data=lambda: Files(LENGTHS), collate=None, batch_size=8, replica=replica, replicas=replicas, seed=0,
                workers=workers if replicas < 3 else 0,
            )
        ]  # fmt: skip
        assert sorted(v for row in rows for v in row) == sorted(v for file in Files(LENGTHS).files for v in file)
        wanted = wanted or sorted(rows)
        assert sorted(rows) == wanted


def test_portions_do_not_depend_on_reading_ahead() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        true = [rng.randrange(12) for _ in range(rng.randrange(1, 6))]
        size = rng.randrange(len(true), 14)
        known = [min(n, rng.randrange(15)) for n in true]
        ended = [k == n and rng.random() < 0.7 for k, n in zip(known, true, strict=True)]
        found = samples_per_shard(available=known, ended=ended, size=size)
        right = samples_per_shard(available=true, ended=[True] * len(true), size=size)
        assert found is None or found == right
        assert right is not None and sum(right) == min(size, sum(true))


def test_states_are_json_or_nothing() -> None:
    state = {"a": (1, [2.5, None]), 3: b"\0\xff", "t": torch.arange(6).reshape(2, 3), "n": torch.arange(3).numpy()}
    again = from_json(json.loads(json.dumps(to_json(state))))
    assert again["a"] == state["a"] and again[3] == state[3] and torch.equal(again["t"], state["t"])
    assert (again["n"] == state["n"]).all()
    with pytest.raises(NotJsonConvertible, match="object"):
        to_json({"x": object()})


def test_an_empty_stream_is_refused() -> None:
    for lengths in ([0, 0], [0]):
        with pytest.raises(DataError, match="empty"):
            read_together(lambda lengths=lengths: Files(lengths), replicas=2, steps=1)  # type: ignore[misc]
    with pytest.raises(JobError, match="has no shard"):
        read_together(lambda: Files([]), replicas=1, steps=1)
    assert Cursor().position == 0


@pytest.mark.parametrize("name", ["shard", "state_dict", "set_epoch", "load_state_dict"])
def test_what_the_dataset_itself_raises_is_named_with_its_line(name: str) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such bucket")

    bad = type("Bad", (Files,), {name: broken})
    before = read_together(lambda: Files([90, 80]), replicas=1, steps=9)[0]
    with pytest.raises(DataError, match=rf"{name}.* failed: ValueError: no such bucket") as caught:
        read_together(lambda: bad([90, 80]), replicas=1, steps=9, cursor=before.cursor, state=before.state)
    assert 'raise ValueError("no such bucket")' in caught.value.where


class Numbers:
    """A stream without shards; `part` says which of its numbers a rank reads, in which order."""

    def __init__(self, part: Callable[[int], Iterable[int]], rank: int) -> None:
        self.part, self.rank = part, rank

    def __iter__(self) -> Iterator[Any]:
        return map(torch.tensor, self.part(self.rank))


class Divided(Files):
    """A stream with shards that was divided by rank before, as `split_dataset_by_node` does."""

    def __init__(self, lengths: list[int], *, spread: int = 1000, rank: int = 0) -> None:
        super().__init__(lengths, spread=spread)
        self.files = [lines[rank::2] for lines in self.files]


drawn = random.Random(0)
OTHERS = [
    ("islice", lambda rank: islice(range(200), rank, None, 2), "none of the first 64 is the same"),
    ("blocks", lambda rank: range(100 * rank, 100 * rank + 100), "none of the first 64 is the same"),
    ("short", lambda rank: range(5 * rank, 5 * rank + 5), "none of the first 5 is the same"),
    ("order", lambda rank: random.Random(rank).sample(range(100), 100), r"of the first 64 are the same, at different"),
    ("drawn", lambda rank: drawn.sample(range(100), 100), "and different ones when it is read again"),
]


@pytest.mark.parametrize(("part", "said"), [case[1:] for case in OTHERS], ids=[case[0] for case in OTHERS])
def test_a_stream_that_differs_by_rank_is_refused_with_its_cause(part: Any, said: str) -> None:
    ranks = count()
    with pytest.raises(DataError, match=rf"gives different samples on rank 1 and rank 0.*{said}") as found:
        read_together(lambda: Numbers(part, next(ranks)), replicas=2, steps=1)
    by_rank = "none of the first" in said
    assert ("selects a part by rank" in found.value.cause) == by_rank
    assert ("the whole stream" in found.value.hint) == (by_rank or "at different" in said)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_shards_that_was_divided_before_is_refused_with_its_cause(workers: int) -> None:
    ranks = count()
    with pytest.raises(
        DataError, match=r"shard \d of the stream gives different samples .*: none of the first"
    ) as found:
        read_together(lambda: Divided([90, 80], rank=next(ranks)), replicas=2, steps=1, micro=6, workers=workers)
    assert "split_dataset_by_node" in found.value.cause and "rank=0, world_size=1" in found.value.hint


def test_a_generator_that_is_divided_by_rank_is_refused_with_its_cause() -> None:
    ranks = count()
    with pytest.raises(DataError, match="none of the first 64 is the same"):
        read_together(lambda: (torch.tensor(n) for n in range(next(ranks), 300, 2)), replicas=2, steps=1)
