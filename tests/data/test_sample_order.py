"""The sample order is a bijection and a pure function, and is dealt to ranks without loss."""

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.order.batches import next_batch
from paceline.data.order.cursor import Cursor
from paceline.data.order.microbatch_assignment import assign_microbatches
from paceline.data.order.permutation import Permutation
from tests.work_count import count_calls


@given(st.integers(1, 5000), st.integers(0, 10), st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_every_index_once(num: int, seed: int, epoch: int) -> None:
    order = Permutation(num_samples=num, seed=seed, epoch=epoch)
    assert sorted(order[0:num].tolist()) == list(range(num))


@given(st.integers(2, 100_000), st.integers(0, 10_000), st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_a_slice_does_not_depend_on_where_one_starts(num: int, start: int, length: int) -> None:
    order = Permutation(num_samples=num, seed=3, epoch=1)
    whole = Permutation(num_samples=num, seed=3, epoch=1)[0:num]
    assert order[start : start + length].tolist() == whole[start : start + length].tolist()


def test_seed_and_epoch_change_the_order() -> None:
    orders = {tuple(Permutation(num_samples=50, seed=s, epoch=e)[0:50].tolist()) for s in range(4) for e in range(4)}
    assert len(orders) == 16


def test_it_looks_uniform() -> None:
    """Where index 0 lands over many seeds: chi-square over 20 bins, far below what a biased shuffle gives."""
    num, trials = 20, 4000
    places = [Permutation(num_samples=num, seed=seed, epoch=0)[0:num].tolist().index(0) for seed in range(trials)]
    counts = np.bincount(places, minlength=num)
    chi_square = float(((counts - trials / num) ** 2 / (trials / num)).sum())
    assert chi_square < 50.0  # 19 degrees of freedom: p = 0.0001


def test_a_resume_in_the_middle_of_two_billion_costs_nothing() -> None:
    def read_in_the_middle() -> list[int]:
        order = Permutation(num_samples=2 * 10**9, seed=1, epoch=0)
        return order[10**9 : 10**9 + 64].tolist()

    tracemalloc.start()
    found, calls = count_calls(read_in_the_middle)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(found)) == 64 and calls < 1000 and peak_bytes < 1 << 20


@given(
    num=st.integers(1, 200),
    batch=st.integers(1, 40),
    micro=st.integers(1, 40),
    replicas=st.integers(1, 8),
    drop_last=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_split_gives_each_sample_once(num: int, batch: int, micro: int, replicas: int, drop_last: bool) -> None:
    if drop_last and num < batch:
        return
    cursor, consumed = Cursor(), []
    while cursor.epoch == 0:
        given_batch = next_batch(
            cursor, num_samples=num, global_batch_size=batch, micro_batch_size=micro, drop_last=drop_last
        )
        if given_batch.cursor.epoch:
            break
        shares = [
            list(assign_microbatches(len(given_batch.micro), replica=r, replicas=replicas)) for r in range(replicas)
        ]
        assert sorted(j for share in shares for j in share) == list(range(len(given_batch.micro)))
        consumed += [p for m in given_batch.micro for p in range(m.start, m.stop)]
        assert all(m.num_samples <= micro for m in given_batch.micro)
        cursor = given_batch.next_cursor
        if cursor.position >= num:
            break
    expected = num // batch * batch if drop_last else num
    assert consumed == list(range(expected))


@given(num=st.integers(1, 60), batch=st.integers(1, 40), drop_last=st.booleans())
@settings(max_examples=60, deadline=None)
def test_samples_are_counted_from_the_run_s_start_over_all_epochs(num: int, batch: int, drop_last: bool) -> None:
    if drop_last and num < batch:
        return
    cursor, total, steps = Cursor(), 0, 0
    while cursor.epoch < 3:
        given_batch = next_batch(
            cursor, num_samples=num, global_batch_size=batch, micro_batch_size=7, drop_last=drop_last
        )
        total, steps = total + sum(micro.num_samples for micro in given_batch.micro), steps + 1
        cursor = given_batch.next_cursor
        assert (cursor.samples, cursor.step) == (total, steps)


def test_the_cursor_survives_json() -> None:
    cursor = Cursor(epoch=3, position=7, samples=99, step=12)
    assert Cursor.from_json(cursor.as_json()) == cursor
