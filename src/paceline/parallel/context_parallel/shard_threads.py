"""Threads of one process that take turns: one thread for each sequence shard of this rank.

Exact context parallelism splits a sequence into a fixed number of shards, and a rank may have several of them. Each
shard runs its own forward, whose attention needs the keys of the other shards. So each forward runs in a thread of its
own, and passes the turn when it needs a tensor that another thread has not computed yet. One thread runs at a time, in
an order that depends on the program only, so all ranks start their collectives in the same order.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from paceline.comm.rank_threads import PeerFailed
from paceline.errors import RunError
from paceline.torch_internals.rng import get_rng_states, set_rng_states

T = TypeVar("T")
_current = threading.local()


def in_shard_thread() -> bool:
    """Return whether the caller is the thread of a sequence shard."""
    return getattr(_current, "shard", None) is not None


class ShardThreads:
    """The threads of a rank's sequence shards. Each has its own state of the random generators.

    `on_switch`, if it is set, is called in the running thread before it passes the turn, and when it ends.
    """

    def __init__(self, *, num_shards: int) -> None:
        self.num_shards = num_shards
        self.on_switch: Callable[[], None] | None = None
        self.on_start: Callable[[], None] = lambda: None
        self._turns = [threading.Semaphore(0) for _ in range(num_shards)]
        self._conditions: list[Callable[[], bool]] = []
        self._is_done: list[bool] = []
        self._errors: dict[int, BaseException] = {}

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Run `work(shard)` in one thread per shard, in the grad mode of the caller, and return the results.

        All threads start with the caller's random generators. Afterwards, the generators have the first thread's state.

        Raises:
            BaseException: the error of the lowest failed shard whose error is not `PeerFailed`.
        """
        self._conditions, self._is_done, self._errors = [_always] * self.num_shards, [False] * self.num_shards, {}
        self.on_start()
        results: dict[int, T] = {}
        initial_states, final_states = get_rng_states(), list[Any]()
        is_grad_enabled, num_threads = torch.is_grad_enabled(), torch.get_num_threads()

        def run_shard(shard: int) -> None:
            self._turns[shard].acquire()
            _current.shard = shard
            try:
                if not self._errors:
                    torch.set_num_threads(num_threads)  # OpenMP has this number for each thread
                    set_rng_states(initial_states)
                    with torch.set_grad_enabled(is_grad_enabled):
                        results[shard] = work(shard)
                    if self.on_switch is not None:
                        self.on_switch()
            except BaseException as error:  # raised below, in the caller's thread
                self._errors[shard] = error
            finally:
                if shard == 0:
                    final_states.append(get_rng_states())
                self._is_done[shard] = True
                self._pass_turn(shard)

        threads = [threading.Thread(target=run_shard, args=(n,), daemon=True) for n in range(self.num_shards)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        set_rng_states(final_states[0])
        failed = [self._errors[shard] for shard in sorted(self._errors)]
        for error in [*(error for error in failed if not isinstance(error, PeerFailed)), *failed]:
            raise error
        return [results[shard] for shard in range(self.num_shards)]

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Let the other shards run until `is_ready()`. The caller is the thread of a shard.

        Raises:
            RunError: all shards wait.
            PeerFailed: another shard has failed.
        """
        if is_ready():
            return
        shard: int = _current.shard
        if self.on_switch is not None:
            self.on_switch()
        self._conditions[shard] = is_ready
        states = get_rng_states()
        self._pass_turn(shard)
        self._turns[shard].acquire()
        self._conditions[shard] = _always
        set_rng_states(states)
        if self._errors:
            raise PeerFailed
        if not is_ready():
            raise RunError(
                "all sequence shards of this rank wait for one another.",
                cause="the shards run different operations: the forward depends on the values of its part",
                hint="a forward that runs the same attention layers for every part, or leave cp out",
            )

    def _pass_turn(self, shard: int) -> None:
        """Wake the next shard that can continue; after an error, or if all shards wait, the next one at all."""
        others = [(shard + offset) % self.num_shards for offset in range(1, self.num_shards + 1)]
        unfinished = [other for other in others if not self._is_done[other]]
        ready = [other for other in unfinished if self._errors or self._conditions[other]()]
        for other in (ready or unfinished)[:1]:
            self._turns[other].release()


def _always() -> bool:
    return True
