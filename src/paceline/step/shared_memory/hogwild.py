"""The step of Hogwild: workers update the same weights without locks (Niu et al., "Hogwild!", NIPS 2011).

Each worker computes the gradient of its part of the batch and updates the weights immediately. It may read weights
while other workers write them. A worker that is `lag` batches ahead waits for the slowest worker.
"""

import time
from dataclasses import replace
from typing import Any

from typing_extensions import override

from paceline.parallel.data_parallel.reducer import LocalReducer
from paceline.parallel.data_parallel.shared_memory_model import SharedModel
from paceline.step.forward_backward import MicrobatchForwardBackward
from paceline.step.microbatches import StepBatch
from paceline.step.replica_context import ReplicaContext
from paceline.step.step_totals import StepResult
from paceline.step.synchronous import SynchronousStep

LAG = 8


class HogwildStep(SynchronousStep):
    """A Hogwild worker's step. Each worker has its own optimizer state; a checkpoint saves the first worker's."""

    lag = LAG

    def __init__(self, replica: ReplicaContext, *, shared_model: SharedModel) -> None:
        replica.reducer.close()
        for recorder in replica.state_recorders:
            recorder.close()
        replica = replace(
            replica, reducer=LocalReducer(named_parameters=replica.update.named_parameters), state_recorders=()
        )
        super().__init__(replica, forward_backward=MicrobatchForwardBackward(replica, divides_locally=True))
        self._shared_model = shared_model
        self._staleness_counts: dict[int, int] = {}
        self._has_started = False

    @override
    def run(self, step_batch: StepBatch, *, stop: bool = False) -> StepResult:
        """Run forward and backward of this worker's microbatches, and its own update."""
        if not self._has_started:
            self._has_started = True
            self.replica.world.barrier()  # all workers have loaded their state
        if not self.replica.model.training:
            self.replica.model.train()
        start_time = time.perf_counter()
        updates_before = self._shared_model.count_peer_updates()
        self.replica.reducer.begin()
        reduction, needs_division = self.forward_backward.run(step_batch, step=self.steps_done, stop=stop)
        count = reduction.local_count()
        if count:  # a worker whose microbatches have no target makes no update
            self.replica.reducer.finish(divisor=count if needs_division else None)
            _, is_applied = self.replica.update.commit(
                step=self.steps_done + 1, loss=reduction.local_loss(), counts=None
            )
            if is_applied:
                self._shared_model.record_update()
                staleness = self._shared_model.count_peer_updates() - updates_before
                self._staleness_counts[staleness] = self._staleness_counts.get(staleness, 0) + 1
        else:
            self.replica.update.step_lr_schedulers()
        self.steps_done += 1
        return StepResult(
            step=self.steps_done,
            samples=step_batch.num_samples,
            reduction=reduction,
            async_grad_norm=None,
            compute_seconds=time.perf_counter() - start_time,
            communication_seconds=0.0,
            lr=self.replica.update.lr,
        )

    @override
    def finish_pending(self) -> None:
        """Wait until all workers have reached this step."""
        self.replica.world.barrier()

    @override
    def collect_staleness(self) -> list[dict[str, Any]]:
        """Return this worker's staleness: how many updates other workers made between its reads and its updates.

        Also return, over all workers, how many additions to the shared update counters were made and were lost.
        """
        lost, made = self._shared_model.lost_and_all_additions
        staleness_counts = [list(pair) for pair in sorted(self._staleness_counts.items())]
        worker_name = f"worker {self.replica.world.rank}"
        return [{"who": worker_name, "late": staleness_counts, "lost": lost, "made": made}]
