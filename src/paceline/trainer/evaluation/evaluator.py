"""Exact metrics: each sample counts once, without padding, and sums do not depend on which rank computed them."""

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

from paceline.data.loader import eval_feed
from paceline.data.reader_process import read_in_process
from paceline.data.source import Source
from paceline.data.stream.rank_mismatch import DIVIDED, EVERY_RANK, NOT_SEEDED, SEED_IT
from paceline.data.types import ReplicaMicrobatch
from paceline.errors import DataError, JobError
from paceline.step.loss.loss_return_value import Terms
from paceline.step.loss.mean_or_sum_probe import MEAN_WITH_COUNT, LossFault, find_loss_fault
from paceline.torch_internals.pytree import to_device
from paceline.torch_internals.rng import seed_all, stream_key
from paceline.torch_internals.scalars import as_number
from paceline.trainer.evaluation.torchmetrics_adapter import TorchMetricsAdapter
from paceline.trainer.setup.build_training_setup import TrainingSetup

_VOTES_UNDER_WAY = 4  # batches that are still evaluated after a stop request
_LIMB_BITS = 32
_SCALE_BITS = 1088
_LIMBS = 72
LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class EvaluatedSplit:
    """The metrics of a whole split."""

    metrics: dict[str, float]
    samples: int
    seconds: float


class ExactSum:
    """A sum of floats without rounding that ranks can add: Python integers, sent as 32-bit limbs."""

    def __init__(self) -> None:
        self._total = 0
        self._broken = False

    def add(self, value: float) -> None:
        """Add one float."""
        if not math.isfinite(value):
            self._broken = True
            return
        top, bottom = value.as_integer_ratio()
        self._total += top << (_SCALE_BITS - bottom.bit_length() + 1)

    def limbs(self) -> list[int]:
        """Return the base 2^32 digits of the magnitude, each with the sum's sign, and a flag for a non-finite sum."""
        magnitude, sign = abs(self._total), -1 if self._total < 0 else 1
        mask = (1 << _LIMB_BITS) - 1
        return [sign * ((magnitude >> (_LIMB_BITS * i)) & mask) for i in range(_LIMBS)] + [int(self._broken)]

    @staticmethod
    def total(limbs: list[int]) -> float:
        """Return the float nearest to the sum of all ranks' limbs."""
        *digits, broken = limbs
        if broken:
            return math.nan
        whole = sum(digit << (_LIMB_BITS * i) for i, digit in enumerate(digits))
        return float(Fraction(whole, 1 << _SCALE_BITS))


def eval_batch_size(setup: TrainingSetup) -> int:
    """Return the samples per forward of an evaluation; a loss over the batch uses as many as in training."""
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
        self._in_time = replica.needs_equal_microbatches or self._worlds.data.world_size < self._world.world_size
        self._tells = setup.step.forward_backward.reports_loss
        self._passes = setup.step.forward_backward
        self._asked: set[str] = set()  # metrics that were checked once to be sums over samples
        self.note = ""
        """A warning about a metric of the last split that is not a sum over samples; equal on every rank."""

    def run(
        self,
        data: Any,
        *,
        batch_size: int,
        name: str,
        beat: Callable[[], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> EvaluatedSplit | None:
        """Return loss, terms and metrics, equal on every rank; None once any rank's `stop` returns True."""
        began = time.perf_counter()
        sums: dict[str, tuple[ExactSum, ExactSum]] = {}
        foreign = TorchMetricsAdapter(self._job.metrics, world=self._worlds.data)
        totals: dict[str, list[int]] = {}
        samples, self.note = 0, ""
        with _evaluating(self._model), torch.no_grad():
            source = self._data.split(data, name=name)
            feed = self._feed(source, batch_size, name, totals)
            for micro in self._in_step(feed, source, batch_size, name, stop) if self._in_time else feed:
                if stop() and not self._in_time:
                    break
                seed_all(stream_key(self._seed, "evaluate", micro.index))  # equal draws on any rank
                self._measure(micro.data, micro.num_samples, sums, foreign)
                samples += micro.num_samples
                if beat is not None:
                    beat()
        everywhere = self._world.gather_json([stop(), totals, self.note])
        if any(stopped for stopped, _, _ in everywhere):
            foreign.reset()
            return None
        _compare([found for _, found, _ in everywhere], name)
        self.note = next((note for _, _, note in everywhere if note), "")
        metrics, total = self._joint(sums, samples)
        metrics |= self._told(foreign.compute())
        return EvaluatedSplit(metrics=metrics, samples=total, seconds=time.perf_counter() - began)

    def _feed(self, source: Source, batch_size: int, name: str, totals: dict[str, list[int]]) -> Any:
        own = self._worlds.data
        agree = self._world.gather_json if self._world.world_size > 1 else None
        return self._feed_of(source, batch_size, name, totals, replica=own.rank, replicas=own.world_size, agree=agree)

    def _feed_of(
        self, source: Source, batch_size: int, name: str, totals: dict[str, list[int]], **whose: Any
    ) -> Iterator[ReplicaMicrobatch]:
        return eval_feed(
            data=source,
            collate=None,
            batch_size=batch_size,
            seed=self._seed,
            name=name,
            totals=totals,
            **whose,
        )

    def _in_step(
        self, feed: Iterator[ReplicaMicrobatch], source: Source, batch_size: int, name: str, stop: Callable[[], bool]
    ) -> Iterator[ReplicaMicrobatch]:
        """Yield microbatches in lockstep: ranks whose forwards wait for each other stop after the same microbatch.

        If a forward waits for other replicas, a replica without a batch repeats an old one with zero samples.
        Otherwise pipeline stages do not wait for each other: they read the decision to stop a few batches later.
        """
        spare: ReplicaMicrobatch | None = None
        votes: deque[tuple[Tensor, Callable[[], object]]] = deque()
        while True:
            micro = next(feed, None)
            told = torch.tensor([int(stop()), int(micro is not None)], device=self._world.device)
            votes.append((told, self._world.start_all_reduce(told)))
            if len(votes) > (0 if self._needs_equal_microbatches else _VOTES_UNDER_WAY):
                told, wait = votes.popleft()
                wait()
                stopped, going = told.tolist()
                if stopped or not going:
                    for _, wait in votes:
                        wait()
                    return
            if micro is None and not self._needs_equal_microbatches:
                continue
            if micro is None and spare is None:
                spare = self._first(source, batch_size, name)
            spare = micro or spare
            assert spare is not None
            yield micro or replace(spare, num_samples=0)

    def _first(self, source: Source, batch_size: int, name: str) -> ReplicaMicrobatch:
        """Return the first batch, regardless of which rank evaluates it."""
        here = replace(source, workers=0)

        def read() -> ReplicaMicrobatch:
            return next(self._feed_of(here, batch_size, name, {}, replica=0, replicas=1))

        return read_in_process(source, read, seed=self._seed)

    def _measure(
        self, data: Any, num_samples: int, sums: dict[str, tuple[ExactSum, ExactSum]], foreign: TorchMetricsAdapter
    ) -> None:
        batch = to_device(data, self._world.device)

        def see(output: Any, terms: Terms, part: Any) -> None:
            if num_samples:
                self._see(output, terms, part, sums, foreign)

        self._passes.evaluate_microbatch(batch, num_samples=num_samples, on_output=see)

    def _see(
        self,
        output: Any,
        terms: Terms,
        batch: Any,
        sums: dict[str, tuple[ExactSum, ExactSum]],
        foreign: TorchMetricsAdapter,
    ) -> None:
        for name, (total, count) in terms.items():
            _add(sums, name if len(terms) == 1 else f"{LOSS}/{name}", total, count)
        for name, metric in (self._job.metrics or {}).items():
            if name in foreign:
                foreign.update(name, output, batch)
                continue
            pair = metric(output, batch)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise JobError(
                    f"the metric {name!r} returned a {type(pair).__name__}, expected (sum, count).",
                    hint=f"metrics={{{name!r}: lambda output, batch: (correct.sum(), correct.numel())}}",
                )
            for part in pair:
                if as_number(part) is None:
                    what = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"type {type(part).__name__}"
                    raise JobError(
                        f"the metric {name!r} returned a value of {what} in its pair, "
                        "expected (sum, count): two numbers.",
                        hint=f"metrics={{{name!r}: lambda output, batch: (correct.sum(), correct.numel())}}",
                    )
            _add(sums, name, *pair)
            if name not in self._asked:
                self._asked.add(name)
                fault = find_loss_fault(metric, output, batch, pair)
                self.note = self.note or (_metric_note(name, fault) if fault is not None else "")

    def _told(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a rank that has the model's outputs."""
        if self._worlds.data.world_size == self._world.world_size:
            return metrics
        told: list[dict[str, float] | None] = self._world.gather_json(metrics if self._tells else None)
        return next(one for one in told if one is not None)

    def _joint(self, sums: dict[str, tuple[ExactSum, ExactSum]], samples: int) -> tuple[dict[str, float], int]:
        names = sorted({name for mine in self._world.gather_json(list(sums)) for name in mine})
        own = sums if self._tells else {}
        rows = [limb for name in names for part in own.get(name, (ExactSum(), ExactSum())) for limb in part.limbs()]
        seen = samples if self._tells and self._worlds.cp.rank == 0 else 0
        vector = torch.tensor([*rows, seen], dtype=torch.int64, device=self._world.device)
        self._world.all_reduce(vector)
        values = vector.tolist()
        width = _LIMBS + 1
        metrics, empty = {}, set()
        for place, name in enumerate(names):
            start = 2 * place * width
            total = ExactSum.total(values[start : start + width])
            count = ExactSum.total(values[start + width : start + 2 * width])
            metrics[name] = total / count if count else math.nan
            if not count and not total and self._on_empty == "zero":
                empty.add(name)
        parts = [value for name, value in metrics.items() if name.startswith(f"{LOSS}/") and name not in empty]
        if parts:
            metrics = {LOSS: math.fsum(parts), **metrics}
        return metrics, int(values[-1])


def _metric_note(name: str, fault: LossFault) -> str:
    is_mean = fault.kind == MEAN_WITH_COUNT
    why = "it returns a mean with a count" if is_mean else "the values of the two halves of a batch do not add up to it"
    return (
        f"the metric {name!r} is not a sum over samples: {why}, so it depends on eval.batch_size. "
        "Return (sum, count): (correct.sum(), correct.numel())"
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and restore each module's own mode afterwards, also of frozen modules."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _compare(everywhere: Sequence[Mapping[str, list[int]]], name: str) -> None:
    """Raise if replicas that read the same stream did not read the same samples."""
    seen: dict[str, tuple[int, list[int]]] = {}
    for rank, theirs in enumerate(everywhere):
        for shard, found in theirs.items():
            other, before = seen.setdefault(shard, (rank, found))
            if before != found:
                raise DataError(
                    f"{name} gave {found[0]} samples on rank {rank} and {before[0]} on rank {other}, and they differ.",
                    cause=f"{NOT_SEEDED}, or not on every rank: {DIVIDED}",
                    hint=f"{SEED_IT}; {EVERY_RANK}",
                )


def _add(sums: dict[str, tuple[ExactSum, ExactSum]], name: str, total: Any, count: Any) -> None:
    pair = sums.setdefault(name, (ExactSum(), ExactSum()))
    for part, value in zip(pair, (total, count), strict=True):
        part.add(float(value.detach() if isinstance(value, Tensor) else value))
