"""Exact metrics: each sample counts once, without padding, and sums do not depend on which ranks computed them."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.loader import read_eval_microbatches
from paceline.data.reader_process import read_in_process
from paceline.data.source import Source
from paceline.data.stream.rank_mismatch import NOT_SEEDED_CAUSE, SEED_HINT, SPLIT_TWICE_CAUSE, WHOLE_STREAM_HINT
from paceline.data.types import ReplicaMicrobatch
from paceline.errors import DataError, JobError
from paceline.step.loss.loss_return_value import Terms
from paceline.step.loss.mean_or_sum_probe import MEAN_WITH_COUNT, LossFault, find_loss_fault
from paceline.torch_internals.pytree import to_device
from paceline.torch_internals.rng import seed_all, stream_key
from paceline.torch_internals.scalars import as_number
from paceline.trainer.evaluation.torchmetrics_adapter import TorchMetricsAdapter
from paceline.trainer.setup.build_training_setup import TrainingSetup

_MAX_PENDING_VOTES = 4  # batches that are still evaluated after a stop request
_LIMB_BITS = 32
_SCALE_BITS = 1088  # a sum is an integer in units of 2**-1088, which is below the smallest float64
_NUM_LIMBS = 72  # 2304 bits: the largest float64 in these units, and room for the sum of many
LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class EvaluatedSplit:
    """The metrics of a whole split."""

    metrics: dict[str, float]
    samples: int
    seconds: float


class ExactSum:
    """A sum of floats that is computed without rounding, as a Python integer.

    Ranks add their sums: each rank sends its integer as 32-bit limbs.
    """

    def __init__(self) -> None:
        self._total = 0
        self._is_nonfinite = False

    def add(self, value: float) -> None:
        """Add one float."""
        if not math.isfinite(value):
            self._is_nonfinite = True
            return
        numerator, denominator = value.as_integer_ratio()
        self._total += numerator << (_SCALE_BITS - denominator.bit_length() + 1)

    def limbs(self) -> list[int]:
        """Return the base 2^32 digits of the magnitude, each with the sum's sign, and a flag for a non-finite sum."""
        magnitude, sign = abs(self._total), -1 if self._total < 0 else 1
        mask = (1 << _LIMB_BITS) - 1
        return [sign * ((magnitude >> (_LIMB_BITS * i)) & mask) for i in range(_NUM_LIMBS)] + [int(self._is_nonfinite)]

    @staticmethod
    def total(limbs: list[int]) -> float:
        """Return the float nearest to the sum of all ranks. `limbs` are the elementwise sums of the ranks' limbs."""
        *digits, is_nonfinite = limbs
        if is_nonfinite:
            return math.nan
        total = sum(digit << (_LIMB_BITS * i) for i, digit in enumerate(digits))
        return float(Fraction(total, 1 << _SCALE_BITS))


def eval_batch_size(setup: TrainingSetup) -> int:
    """Return the number of samples per forward of an evaluation.

    By default, it is the size of a microbatch, or of a global batch if the loss covers the whole batch.
    """
    plan = setup.plan
    derived = plan.global_batch_size if setup.job.loss_over == "batch" else plan.micro_batch_size
    return setup.settings.eval.batch_size or derived


class Evaluator:
    """An evaluator that runs a model over a split."""

    def __init__(self, setup: TrainingSetup) -> None:
        replica = setup.step.replica
        self._job = setup.job
        self._model = setup.model
        self._worlds = setup.worlds
        self._world = setup.world
        self._seed = setup.settings.seed
        self._data = setup.data
        self._on_empty = setup.settings.train.on_empty
        self._needs_equal_microbatches = replica.needs_equal_microbatches
        self._must_stop_together = (
            replica.needs_equal_microbatches or self._worlds.data.world_size < self._world.world_size
        )
        self._reports_metrics = setup.step.forward_backward.reports_loss
        self._forward_backward = setup.step.forward_backward
        self._checked_metrics: set[str] = set()  # metrics that were checked once to be sums over samples
        self.note = ""
        """A warning about a metric of the last split that is not a sum over samples; equal on every rank."""

    def run(
        self,
        data: Any,
        *,
        batch_size: int,
        name: str,
        send_heartbeat: Callable[[], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> EvaluatedSplit | None:
        """Return loss, terms and metrics, equal on every rank. Return None if `stop` returned True on any rank.

        `data` is the split as the job gives it, and `name` is the split's name in errors.
        """
        start_time = time.perf_counter()
        sums: dict[str, tuple[ExactSum, ExactSum]] = {}
        torchmetrics = TorchMetricsAdapter(self._job.metrics, world=self._worlds.data)
        shard_totals: dict[str, list[int]] = {}
        samples, self.note = 0, ""
        with _eval_mode(self._model), torch.no_grad():
            source = self._data.split(data, name=name)
            loader = self._make_loader(source, batch_size, name, shard_totals)
            for microbatch in (
                self._read_and_stop_together(loader, source, batch_size, name, stop)
                if self._must_stop_together
                else loader
            ):
                if stop() and not self._must_stop_together:
                    break
                seed_all(stream_key(self._seed, "evaluate", microbatch.index))  # the same draws on any rank
                self._evaluate_batch(microbatch.data, microbatch.num_samples, sums, torchmetrics)
                samples += microbatch.num_samples
                if send_heartbeat is not None:
                    send_heartbeat()
        by_rank = self._world.gather_json([stop(), shard_totals, self.note])
        if any(stopped for stopped, _, _ in by_rank):
            torchmetrics.reset()
            return None
        _check_same_samples([rank_totals for _, rank_totals, _ in by_rank], name)
        self.note = next((note for _, _, note in by_rank if note), "")
        metrics, total = self._reduce_sums(sums, samples)
        metrics |= self._share_torchmetrics(torchmetrics.compute())
        return EvaluatedSplit(metrics=metrics, samples=total, seconds=time.perf_counter() - start_time)

    def _make_loader(self, source: Source, batch_size: int, name: str, shard_totals: dict[str, list[int]]) -> Any:
        replica_world = self._worlds.data
        gather = self._world.gather_json if self._world.world_size > 1 else None
        return self._make_replica_loader(
            source,
            batch_size,
            name,
            shard_totals,
            replica=replica_world.rank,
            replicas=replica_world.world_size,
            gather_json=gather,
        )

    def _make_replica_loader(
        self, source: Source, batch_size: int, name: str, shard_totals: dict[str, list[int]], **replica_options: Any
    ) -> Iterator[ReplicaMicrobatch]:
        return read_eval_microbatches(
            data=source,
            collate=None,
            batch_size=batch_size,
            seed=self._seed,
            name=name,
            totals=shard_totals,
            **replica_options,
        )

    def _read_and_stop_together(
        self, loader: Iterator[ReplicaMicrobatch], source: Source, batch_size: int, name: str, stop: Callable[[], bool]
    ) -> Iterator[ReplicaMicrobatch]:
        """Yield microbatches so that ranks whose forwards wait for each other stop after the same microbatch.

        If a forward waits for other replicas, a replica that has no batch left repeats an old batch with zero samples.
        Otherwise, ranks read the common decision to stop a few batches later, so that pipeline stages do not wait.
        """
        repeated_microbatch: ReplicaMicrobatch | None = None
        # A vote is a tensor and the function that waits for its all-reduce. The tensor has two counts: how many ranks
        # stop, and how many ranks have a batch.
        votes: deque[tuple[Tensor, Callable[[], object]]] = deque()
        while True:
            microbatch = next(loader, None)
            vote = torch.tensor([int(stop()), int(microbatch is not None)], device=self._world.device)
            votes.append((vote, self._world.start_all_reduce(vote)))
            if len(votes) > (0 if self._needs_equal_microbatches else _MAX_PENDING_VOTES):
                vote, wait = votes.popleft()
                wait()
                num_stopping, num_with_batch = vote.tolist()
                if num_stopping or not num_with_batch:
                    for _, wait in votes:
                        wait()
                    return
            if microbatch is None and not self._needs_equal_microbatches:
                continue
            if microbatch is None and repeated_microbatch is None:
                repeated_microbatch = self._read_first_batch(source, batch_size, name)
            repeated_microbatch = microbatch or repeated_microbatch
            assert repeated_microbatch is not None
            yield microbatch or replace(repeated_microbatch, num_samples=0)

    def _read_first_batch(self, source: Source, batch_size: int, name: str) -> ReplicaMicrobatch:
        """Return the first batch, regardless of which rank evaluates it."""
        in_process_source = replace(source, workers=0)

        def read() -> ReplicaMicrobatch:
            return next(self._make_replica_loader(in_process_source, batch_size, name, {}, replica=0, replicas=1))

        return read_in_process(source, read, seed=self._seed)

    def _evaluate_batch(
        self, data: Any, num_samples: int, sums: dict[str, tuple[ExactSum, ExactSum]], torchmetrics: TorchMetricsAdapter
    ) -> None:
        """Run the forward of one microbatch, and add its loss terms and metrics to `sums` and `torchmetrics`."""
        batch = to_device(data, self._world.device)

        def record_outputs(output: Any, terms: Terms, local_batch: Any) -> None:
            if num_samples:
                self._record_outputs(output, terms, local_batch, sums, torchmetrics)

        self._forward_backward.evaluate_microbatch(batch, num_samples=num_samples, on_output=record_outputs)

    def _record_outputs(
        self,
        output: Any,
        terms: Terms,
        batch: Any,
        sums: dict[str, tuple[ExactSum, ExactSum]],
        torchmetrics: TorchMetricsAdapter,
    ) -> None:
        """Add the loss terms and metrics of one microbatch to `sums` and `torchmetrics`."""
        for name, (total, count) in terms.items():
            _add_to_sums(sums, name if len(terms) == 1 else f"{LOSS}/{name}", total, count)
        for name, metric in (self._job.metrics or {}).items():
            if name in torchmetrics:
                torchmetrics.update(name, output, batch)
                continue
            sum_and_count = metric(output, batch)
            if not isinstance(sum_and_count, tuple) or len(sum_and_count) != 2:
                raise JobError(
                    f"the metric {name!r} returned a {type(sum_and_count).__name__}, expected (sum, count).",
                    hint=f"metrics={{{name!r}: lambda output, batch: (correct.sum(), correct.numel())}}",
                )
            for value in sum_and_count:
                if as_number(value) is None:
                    description = (
                        f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
                    )
                    raise JobError(
                        f"the metric {name!r} returned a value of {description} in its pair, "
                        "expected (sum, count): two numbers.",
                        hint=f"metrics={{{name!r}: lambda output, batch: (correct.sum(), correct.numel())}}",
                    )
            _add_to_sums(sums, name, *sum_and_count)
            if name not in self._checked_metrics:
                self._checked_metrics.add(name)
                fault = find_loss_fault(metric, output, batch, sum_and_count)
                self.note = self.note or (_metric_note(name, fault) if fault is not None else "")

    def _share_torchmetrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return, on every rank, the metrics of a rank that has the model's outputs."""
        if self._worlds.data.world_size == self._world.world_size:
            return metrics
        by_rank: list[dict[str, float] | None] = self._world.gather_json(metrics if self._reports_metrics else None)
        return next(rank_metrics for rank_metrics in by_rank if rank_metrics is not None)

    def _reduce_sums(self, sums: dict[str, tuple[ExactSum, ExactSum]], samples: int) -> tuple[dict[str, float], int]:
        """Return the metrics over all ranks, from the `(sum, count)` of each, and the number of all samples."""
        names = sorted({name for rank_names in self._world.gather_json(list(sums)) for name in rank_names})
        local_sums = sums if self._reports_metrics else {}
        pairs = [local_sums.get(name, (ExactSum(), ExactSum())) for name in names]
        limbs = [limb for pair in pairs for exact_sum in pair for limb in exact_sum.limbs()]
        num_samples = samples if self._reports_metrics and self._worlds.cp.rank == 0 else 0
        vector = torch.tensor([*limbs, num_samples], dtype=torch.int64, device=self._world.device)
        self._world.all_reduce(vector)
        values = vector.tolist()
        width = _NUM_LIMBS + 1
        metrics, empty_terms = {}, set()
        for position, name in enumerate(names):
            start = 2 * position * width
            total = ExactSum.total(values[start : start + width])
            count = ExactSum.total(values[start + width : start + 2 * width])
            metrics[name] = total / count if count else math.nan
            if not count and not total and self._on_empty == "zero":
                empty_terms.add(name)
        terms = [value for name, value in metrics.items() if name.startswith(f"{LOSS}/") and name not in empty_terms]
        if terms:
            metrics = {LOSS: math.fsum(terms), **metrics}
        return metrics, int(values[-1])


def _metric_note(name: str, fault: LossFault) -> str:
    is_mean = fault.kind == MEAN_WITH_COUNT
    reason = (
        "it returns a mean with a count" if is_mean else "the values of the two halves of a batch do not add up to it"
    )
    return (
        f"the metric {name!r} is not a sum over samples: {reason}, so it depends on eval.batch_size. "
        "Return (sum, count): (correct.sum(), correct.numel())"
    )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Return a context in which the model is in evaluation mode. The exit restores the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check_same_samples(totals_by_rank: Sequence[Mapping[str, list[int]]], name: str) -> None:
    """Raise an error if replicas that read the same shard of a stream did not read the same samples.

    `totals_by_rank` has, for each rank, the sample count and the checksum of each shard that the rank has read.
    """
    first_totals: dict[str, tuple[int, list[int]]] = {}
    for rank, rank_totals in enumerate(totals_by_rank):
        for shard, totals in rank_totals.items():
            first_rank, expected = first_totals.setdefault(shard, (rank, totals))
            if expected != totals:
                raise DataError(
                    f"{name} gave {totals[0]} samples on rank {rank} and {expected[0]} on rank {first_rank}, "
                    "and the samples differ.",
                    cause=f"{NOT_SEEDED_CAUSE}, or depends on the rank: {SPLIT_TWICE_CAUSE}",
                    hint=f"{SEED_HINT}; {WHOLE_STREAM_HINT}",
                )


def _add_to_sums(sums: dict[str, tuple[ExactSum, ExactSum]], name: str, total: Any, count: Any) -> None:
    pair = sums.setdefault(name, (ExactSum(), ExactSum()))
    for exact_sum, value in zip(pair, (total, count), strict=True):
        exact_sum.add(float(value.detach() if isinstance(value, Tensor) else value))
