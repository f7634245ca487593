"""The synchronous step with several replicas in one process: each runs its microbatches in its own thread.

Every replica runs the same program as a rank (`SynchronousStep.compute_gradients`), in a world of threads. The reduced
gradients are in the first replica, which makes the update; all replicas share the weights.
"""

from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from paceline.comm.rank_threads import ThreadWorld
from paceline.parallel.data_parallel.thread_replicas import ThreadReplicas
from paceline.parallel.gradients.partition import do_nothing
from paceline.step.microbatches import StepBatch, select_replica_batch
from paceline.step.replica_context import ReplicaContext
from paceline.step.shared_memory.rng_turns import HostRandomness, HostRngTurns
from paceline.step.shared_memory.thread_pool import ReplicaThreadPool
from paceline.step.step_totals import StepResult
from paceline.step.synchronous import SynchronousStep


class ThreadsStep(SynchronousStep):
    """The first replica's step; the other replicas run in threads while gradients are computed."""

    def __init__(
        self,
        replica: ReplicaContext,
        *,
        other_replicas: Sequence[ReplicaContext],
        thread_replicas: ThreadReplicas,
        rng_turns: HostRngTurns,
    ) -> None:
        assert isinstance(replica.world, ThreadWorld)
        super().__init__(replica)
        rendezvous = replica.world.rendezvous
        self._other_steps = [SynchronousStep(other) for other in other_replicas]
        self._thread_replicas = thread_replicas
        self._rendezvous = rendezvous
        self._rng_turns = rng_turns
        self._threads = ReplicaThreadPool(on_error=rendezvous.end)

    @override
    def compute_gradients(self, step_batch: StepBatch, *, stop: bool = False) -> StepResult:
        """Compute the global gradient in the first replica.

        If the model draws random numbers in this step but drew none in the first step, run the step again, in turns.
        """
        while True:
            self._thread_replicas.refresh()
            draws_nothing = self._rng_turns.host_randomness is HostRandomness.NONE
            undo = self._thread_replicas.save_step_state() if draws_nothing else do_nothing
            states_before = self._rng_turns.states() if draws_nothing else ()
            result = self._run_replicas(step_batch, stop)
            if not draws_nothing:
                self._rng_turns.record_draws()
                return result
            if self._rng_turns.states() == states_before:
                return result
            undo()
            self._rng_turns.reset_draws()

    @override
    def close(self) -> None:
        """Stop the threads and remove the hooks from the models."""
        super().close()
        for other in self._other_steps:
            other.close()
        self._threads.close()

    def _run_replicas(self, step_batch: StepBatch, stop: bool) -> StepResult:
        """Compute the gradients of each replica in a thread of its own, and return the first replica's result."""
        self._rendezvous.reset()
        num_replicas = 1 + len(self._other_steps)
        batches = [
            select_replica_batch(step_batch, replica=index, num_replicas=num_replicas) for index in range(num_replicas)
        ]
        for step in (self, *self._other_steps):
            step.replica.random_streams.is_gpu_only = self._rng_turns.host_randomness is HostRandomness.NONE
        for other in self._other_steps:
            other.steps_done = self.steps_done
        compute_first = super().compute_gradients
        functions: list[Callable[[], StepResult]] = [lambda: compute_first(batches[0], stop=stop)]
        functions += [
            _replica_function(other, batch) for other, batch in zip(self._other_steps, batches[1:], strict=True)
        ]
        result, *_ = self._threads.run(functions)
        for other in self._other_steps:
            other.replica.reducer.begin()
        return result


def _replica_function(step: SynchronousStep, step_batch: StepBatch) -> Callable[[], StepResult]:
    def run_replica() -> StepResult:
        if step.replica.world.device.type == "cuda":
            torch.cuda.set_device(step.replica.world.device)
        return step.compute_gradients(step_batch)

    return run_replica
