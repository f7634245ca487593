"""The step of Hogwild: workers update the same weights without locks (Niu et al., "Hogwild!", NIPS 2011).

Each worker computes the gradient of its own part of the batch and steps at once. It reads concurrent writes of others
as they arrive, torn or not. A worker can be at most `lag` batches ahead: then it waits for the slowest.
"""

import time
from dataclasses import replace
from typing import Any

from paceline.parallel.data_parallel.reducer import LocalReducer
from paceline.parallel.data_parallel.shared_memory_model import SharedModel
from paceline.step.forward_backward import MicrobatchForwardBackward
from paceline.step.microbatches import StepBatch
from paceline.step.replica_context import StepContext
from paceline.step.step_reduction import StepResult
from paceline.step.synchronous import SynchronousStep

LAG = 8


class HogwildStep(SynchronousStep):
    """A Hogwild worker's step. Each worker has its own optimizer state; a checkpoint saves the first worker's."""

    lag = LAG

    def __init__(self, parts: StepContext, *, shared: SharedModel) -> None:
        parts.reducer.close()
        for tape in parts.tapes:
            tape.close()
        parts = replace(parts, reducer=LocalReducer(named=parts.update.named), tapes=())
        super().__init__(parts, passes=MicrobatchForwardBackward(parts, alone=True))
        self._shared = shared
        self._late: dict[int, int] = {}
        self._begun = False

    def run(self, given: StepBatch, *, stop: bool = False) -> StepResult:
        """Run forward and backward of this worker's microbatches, and its own update."""
        if not self._begun:
            self._begun = True
            self.parts.world.barrier()  # all workers have loaded their state
        if not self.parts.model.training:
            self.parts.model.train()
        began = time.perf_counter()
        before = self._shared.others()
        self.parts.reducer.begin()
        joint, divide = self.passes.run(given, step=self.step, stop=stop)
        count = joint.own_count()
        if count:  # a share without a target makes no update
            self.parts.reducer.finish(divisor=count if divide else None)
            _, taken = self.parts.update.commit(step=self.step + 1, loss=joint.own_loss(), counts=None)
            if taken:
                self._shared.count()
                late = self._shared.others() - before
                self._late[late] = self._late.get(late, 0) + 1
        else:
            self.parts.update.follow()
        self.step += 1
        return StepResult(
            step=self.step,
            samples=given.num_samples,
            joint=joint,
            norm=None,
            compute_seconds=time.perf_counter() - began,
            communication_seconds=0.0,
            lr=self.parts.update.lr,
        )

    def settle(self) -> None:
        """Wait until all workers have reached this step."""
        self.parts.world.barrier()

    def lateness(self) -> list[dict[str, Any]]:
        """Return how many updates other workers made between this worker's read and its write."""
        lost, made = self._shared.lost
        late = [list(pair) for pair in sorted(self._late.items())]
        who = f"worker {self.parts.world.rank}"
        return [{"who": who, "late": late, "lost": lost, "made": made}]
