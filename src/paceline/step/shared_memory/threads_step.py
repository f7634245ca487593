"""The synchronous step with several replicas in one process: each runs its microbatches in its own thread.

Every replica runs the same program as a rank (`SynchronousStep.compute_gradients`), in a world of threads. The reduced
gradients are in the first replica, which makes the update; all replicas share the weights.
"""

from collections.abc import Callable, Sequence

import torch

from paceline.comm.rank_threads import ThreadWorld
from paceline.parallel.data_parallel.thread_replicas import ThreadReplicas
from paceline.step.microbatches import StepBatch, split_over_replicas
from paceline.step.replica_context import ReplicaContext
from paceline.step.shared_memory.rng_turns import HostRandomness, HostRngTurns
from paceline.step.shared_memory.thread_pool import ReplicaThreads
from paceline.step.step_totals import StepResult
from paceline.step.synchronous import SynchronousStep


class ThreadsStep(SynchronousStep):
    """The first replica's step; the other replicas run in threads while gradients are computed."""

    def __init__(
        self, replica: ReplicaContext, *, others: Sequence[ReplicaContext], mirror: ThreadReplicas, turns: HostRngTurns
    ) -> None:
        assert isinstance(replica.world, ThreadWorld)
        super().__init__(replica)
        meeting = replica.world.meeting
        self._others = [SynchronousStep(other) for other in others]
        self._mirror = mirror
        self._meeting = meeting
        self._turns = turns
        self._crew = ReplicaThreads(on_error=meeting.leave)

    def gradients(self, given: StepBatch, *, stop: bool = False) -> StepResult:
        """Compute the global gradient in the first replica.

        If a model that did not draw random numbers so far draws in this step, run the step again, in turns.
        """
        while True:
            self._mirror.refresh()
            nobody = self._turns.draws is HostRandomness.NONE
            undo = self._mirror.keep() if nobody else _nothing
            before = self._turns.states() if nobody else ()
            result = self._together(given, stop)
            if not nobody:
                self._turns.settle()
                return result
            if self._turns.states() == before:
                return result
            undo()
            self._turns.watch_again()

    def close(self) -> None:
        """Stop the threads and remove the hooks from the models."""
        super().close()
        for other in self._others:
            other.close()
        self._crew.close()

    def _together(self, given: StepBatch, stop: bool) -> StepResult:
        self._meeting.begin()
        count = 1 + len(self._others)
        shares = [split_over_replicas(given, replica=index, replicas=count) for index in range(count)]
        for step in (self, *self._others):
            step.replica.streams.asleep = self._turns.draws is HostRandomness.NONE
        for other in self._others:
            other.steps_done = self.steps_done
        first = super().gradients
        bodies: list[Callable[[], StepResult]] = [lambda: first(shares[0], stop=stop)]
        bodies += [_body(other, mine) for other, mine in zip(self._others, shares[1:], strict=True)]
        result, *_ = self._crew.run(bodies)
        for other in self._others:
            other.replica.reducer.begin()
        return result


def _body(step: SynchronousStep, given: StepBatch) -> Callable[[], StepResult]:
    def body() -> StepResult:
        if step.replica.world.device.type == "cuda":
            torch.cuda.set_device(step.replica.world.device)
        return step.gradients(given)

    return body


def _nothing() -> None:
    return None
