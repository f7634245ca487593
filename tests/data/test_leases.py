"""A parameter server's leases: no gradient exceeds the bound, no worker waits forever, each share counts once."""

import math
import random
from collections import Counter

import pytest

from paceline.data.order.leases import BatchShare, Lease, Leases


def batch(step: int, of: int) -> list[BatchShare]:
    return [BatchShare(step=step, number=number, num_shares=of) for number in range(of)]


class Play:
    """Workers that come, push, and die in any order."""

    def __init__(self, *, bound: float, workers: int, seed: int) -> None:
        self.books = Leases(bound=bound)
        self.random = random.Random(seed)
        self.workers = list(range(workers))
        self.held: dict[int, Lease] = {}
        self.taken: Counter[tuple[int, int]] = Counter()
        self.late: list[int] = []
        self.step = 0

    def take(self) -> None:
        while leases := self.books.ready_leases():
            self.late += [self.books.version - lease.version for lease in leases]
            self.taken.update((lease.share.step, lease.share.number) for lease in leases)
            self.books.record_update(leases)

    def move(self, *, shares: int, kills: bool) -> None:
        if self.books.num_free < shares and not (
            self.books.sums_shares and (self.books.num_free or self.books.num_in_flight)
        ):
            self.books.add_shares(batch(self.step, shares))
            self.step += 1
        worker = self.random.choice(self.workers)
        if worker not in self.held:
            lease = self.books.lease_next(worker)
            if lease is not None:
                self.held[worker] = lease
        elif kills and self.random.random() < 0.1:
            self.books.release_worker(worker)
            del self.held[worker]
        else:
            self.books.record_push(self.held.pop(worker))
        self.take()

    def rest(self) -> None:
        """No more batches: what is free or under way must end, whoever goes on."""
        for _ in range(10_000):
            if not self.books.num_free and not self.books.num_in_flight:
                return
            for worker in self.workers:
                if worker not in self.held and (lease := self.books.lease_next(worker)) is not None:
                    self.held[worker] = lease
            for worker in list(self.held):
                self.books.record_push(self.held.pop(worker))
                self.take()
        raise AssertionError("somebody waits for ever")


@pytest.mark.parametrize("bound", [0, 1, 2, 4, 9, math.inf])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("kills", [False, True])
def test_no_gradient_is_later_than_the_bound_and_each_share_is_taken_once(
    bound: float, workers: int, kills: bool
) -> None:
    for seed in range(5):
        play = Play(bound=bound, workers=workers, seed=seed)
        for _ in range(1500):
            play.move(shares=3, kills=kills)
        play.rest()
        assert max(play.late) <= bound
        assert sorted(play.taken) == [(step, number) for step in range(play.step) for number in range(3)]
        assert set(play.taken.values()) == {1}
        assert sum(sum(counts.values()) for counts in play.books.staleness_counts.values()) == len(play.late)


def test_the_bound_is_reached_and_not_only_kept() -> None:
    for bound in (1, 2, 4):
        play = Play(bound=bound, workers=8, seed=0)
        for _ in range(3000):
            play.move(shares=8, kills=False)
        assert max(play.late) == bound


def test_as_many_compute_at_once_as_the_bound_can_take() -> None:
    books = Leases(bound=2)
    books.add_shares(batch(0, 8))
    held = [books.lease_next(worker) for worker in range(5)]
    assert [lease is not None for lease in held] == [True, True, True, False, False]


def test_an_update_waits_for_one_that_would_be_too_late() -> None:
    books = Leases(bound=1)
    books.add_shares(batch(0, 4))
    slow, quick = books.lease_next(0), books.lease_next(1)
    assert slow is not None and quick is not None
    books.record_push(quick)
    assert list(books.ready_leases()) == [quick]
    books.record_update([quick])
    again = books.lease_next(1)
    assert again is not None and books.lease_next(2) is None
    books.record_push(again)
    assert not books.ready_leases(), "after it the slow one would be two updates late"
    books.record_push(slow)
    assert list(books.ready_leases()) == [slow]
    books.record_update([slow])
    books.record_update(books.ready_leases())
    assert books.staleness_counts == {1: Counter({0: 1, 1: 1}), 0: Counter({1: 1})}


def test_with_bound_0_a_batch_is_one_update_in_the_order_of_its_shares() -> None:
    books = Leases(bound=0)
    books.add_shares(batch(0, 2))
    first, second = books.lease_next(5), books.lease_next(6)
    assert first is not None and second is not None
    books.add_shares(batch(1, 2))
    assert books.lease_next(7) is None, "the next batch wants the update of this one"
    books.record_push(second)
    assert not books.ready_leases()
    books.record_push(first)
    assert list(books.ready_leases()) == [first, second]
    books.record_update([first, second])
    assert books.version == 1 and books.lease_next(7) is not None


def test_what_a_dead_worker_held_goes_first_to_the_next_and_what_it_pushed_stays() -> None:
    books = Leases(bound=math.inf)
    books.add_shares(batch(0, 3))
    pushed, held = books.lease_next(1), books.lease_next(1)
    assert pushed is not None and held is not None
    books.record_push(pushed)
    assert books.release_worker(1) == [held.share]
    again = books.lease_next(2)
    assert again is not None and again.share == held.share and list(books.ready_leases()) == [pushed]


def test_an_update_that_was_left_out_makes_no_version() -> None:
    books = Leases(bound=4)
    books.add_shares(batch(0, 1))
    lease = books.lease_next(1)
    assert lease is not None
    books.record_push(lease)
    books.record_update(books.ready_leases(), is_applied=False)
    assert books.version == 0 and not books.staleness_counts
