"""The step of local SGD and DiLoCo: a site trains on its own and synchronises with the others periodically.

Within a site, a step is the synchronous step of the site's layout. The results of each step are sent to the other sites
without waiting, several steps per message, and are read `lag` steps later.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from paceline.step.forward_backward import ForwardBackward
from paceline.step.local_sgd.message_batching import MessageBatcher
from paceline.step.local_sgd.site_synchronizer import SiteSynchronizer
from paceline.step.microbatches import StepBatch
from paceline.step.replica_context import ReplicaContext
from paceline.step.step_totals import FINGERPRINT, STOP, StepResult, TotalsReduction
from paceline.step.synchronous import SynchronousStep

LAG = 8
_STEPS_PER_MESSAGE = LAG // 2


class LocalStep(SynchronousStep):
    """A local SGD step on one rank. `first_microbatch` is the index of this site's first microbatch in each batch."""

    lag = LAG

    def __init__(
        self,
        replica: ReplicaContext,
        *,
        site_synchronizer: SiteSynchronizer,
        first_microbatch: int,
        forward_backward: ForwardBackward | None = None,
    ) -> None:
        super().__init__(replica, forward_backward=forward_backward)
        self.site_synchronizer = site_synchronizer
        self._first_microbatch = first_microbatch
        self._batcher = MessageBatcher(site_synchronizer.peers, max_vectors=_STEPS_PER_MESSAGE)
        self._names: tuple[str, ...] | None = None

    @override
    def run(self, step_batch: StepBatch, *, stop: bool = False) -> StepResult:
        """Run this site's own update. Then send the fragment and apply the fragments that are due at this step."""
        result = super().run(step_batch, stop=stop) if step_batch.num_micro > self._first_microbatch else None
        if result is not None:
            result.totals.check_counts()
        if self._names is None:
            names_by_rank = self.site_synchronizer.peers.gather_json(None if result is None else result.reduction.names)
            self._names = tuple(next(names for names in names_by_rank if names))  # of the first site with samples
        result = result or self._run_without_samples(step_batch, stop=stop)
        result = replace(result, reduction=result.reduction.reduce_over_sites(self._batcher))
        start_time = time.perf_counter()
        self.site_synchronizer.synchronize_due(self.steps_done)
        result.communication_seconds += time.perf_counter() - start_time
        return result

    @override
    def _commit_update(self, result: StepResult, loss: float | None, counts: Mapping[str, float] | None) -> None:
        """Update the weights from the loss terms that have a target in this site's samples.

        If no term has one, only the LR schedulers advance. If no site has a target, the totals over all sites show
        that, and the run reports an error.
        """
        totals = result.totals
        if all(totals.counts.values()):
            super()._commit_update(result, loss, counts)
        elif any(totals.counts.values()):
            super()._commit_update(
                result, math.fsum(totals.terms[name] for name, count in totals.counts.items() if count), None
            )
        else:
            self.replica.update.step_lr_schedulers()
            self.steps_done += 1

    @override
    def flush_reports(self) -> None:
        """Send the results that do not fill a message yet."""
        self._batcher.send()

    @property
    @override
    def sent_bytes(self) -> float:
        """The bytes sent to other sites only."""
        return self.site_synchronizer.communication_cost["sent_bytes"]

    @override
    def finish_pending(self) -> None:
        """Wait until no all-reduce between sites is in flight."""
        self.site_synchronizer.wait_for_all()

    @override
    def synchronized_weights(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context in which the model has the mean of the sites' weights; it yields the site's own weights."""
        return self.site_synchronizer.mean_weights()

    @override
    def collect_staleness(self) -> Sequence[Mapping[str, Any]]:
        """Return the cost of synchronisation for this rank: bytes sent and seconds waited.

        `late`, the number of gradients by staleness, is empty, because local SGD does not count staleness.
        """
        world = self.replica.world
        site_name = f"site {self.site_synchronizer.site_index}" + (
            f", its rank {world.rank}" if world.world_size > 1 else ""
        )
        return [{"who": site_name, "late": [], **self.site_synchronizer.communication_cost}]

    def _run_without_samples(self, step_batch: StepBatch, *, stop: bool) -> StepResult:
        """Advance the LR schedulers, and return the result of a short batch that has no samples for this site."""
        self.replica.update.step_lr_schedulers()
        reduction = TotalsReduction(
            world=self.replica.world,
            names=self._names or (),
            num_micro=step_batch.num_micro,
            on_empty=self.replica.update.on_empty,
        )
        reduction.set_flag(STOP, float(stop))
        reduction.set_flag(FINGERPRINT, float(step_batch.fingerprint))
        reduction.start()
        self.steps_done += 1
        return StepResult(
            step=self.steps_done,
            samples=step_batch.num_samples,
            reduction=reduction,
            async_grad_norm=None,
            compute_seconds=0.0,
            communication_seconds=0.0,
        )
