"""Compare the layout's evaluation with that of one process at equal weights: each sample once, sums over counts."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from paceline.checkpoint.state_outside_state_dict import tensors_of
from paceline.data.reader_process import read_apart
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.torch_internals.rng import host_states, seed_all, stream_key
from paceline.trainer.evaluation.evaluator import EvaluatedSplit, Evaluator
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.noise_floor import MARGIN, ModelSnapshot, nudge_weights
from paceline.verification.reference.process_group_isolation import single_process
from paceline.verification.reference.reference import Reference
from paceline.verification.rung_result import RungResult

_EVALUATED_BATCHES = 4
_METRIC = 1e-6
_CUT = 1e-4  # relative difference of a metric between two batch sizes that rounding may explain
_RUNS = 3
_UNITS = 4.0  # machine epsilons of the forward's precision by which a layout's arithmetic may move every weight


def evaluated_by(built: TrainingSetup) -> EvaluatedSplit | None:
    """Return the layout's own evaluation of a few batches; None for data that cannot be cut."""
    data = _some(built.job.eval_data, built)
    if data is None:
        return None
    evaluator = Evaluator(built)
    size = built.plan.micro_batch_size
    return evaluator.run(data, batch_size=size, name="eval_data")


def judge_evaluation(
    rung_result: RungResult,
    built: TrainingSetup,
    reference: Reference,
    evaluated: EvaluatedSplit,
    steps: int,
    theirs: Mapping[str, Tensor],
) -> None:
    """Compare the layout's evaluation with one process that evaluates the layout's own weights."""
    with torch.no_grad():
        for name, tensor in tensors_of(reference.model).items():
            if name in theirs:  # a tied parameter is stored under its first name
                copy_into(tensor, theirs[name])
    by_hand = _ByHand(built, reference)
    right = by_hand.metrics()
    if by_hand.samples != evaluated.samples:
        cause = f"evaluation saw {evaluated.samples} samples instead of {by_hand.samples}"
        rung_result.blame(step=steps, parameter="(evaluation)", cause=cause)
    rung_result.warning = by_hand.warning()
    apart = {name: _apart(evaluated.metrics.get(name, math.nan), value) for name, value in right.items()}
    floors = by_hand.floors() if any(apart.values()) and not by_hand.draws else {}
    for name, far in apart.items():
        if far and by_hand.draws:
            rung_result.detail += (
                f" {name} was not compared: its evaluation draws random numbers, which differ on each rank."
            )
            continue
        rung_result.count("metrics", 1)
        if far and not far <= floors[name]:
            found = evaluated.metrics.get(name, math.nan)
            cause = (
                f"evaluation: {name} is {found:.6g} instead of {right[name]:.6g} at equal weights: a "
                "different mean, or samples "
                "left out"
            )
            rung_result.blame(step=steps, parameter="(evaluation)", cause=cause)


class _ByHand:
    """An evaluation by one process, which can be repeated with disturbed weights. `draws`: it draws random numbers."""

    def __init__(self, built: TrainingSetup, reference: Reference) -> None:
        self._built, self._reference = built, reference
        self._collate = built.job.collate or torch.utils.data.default_collate
        data = _some(built.job.eval_data, built)
        if isinstance(data, DataLoader):
            self._collate = built.job.collate or data.collate_fn
            data = data.dataset
        self._data = data
        self._metrics = {n: m for n, m in (built.job.metrics or {}).items() if not hasattr(m, "compute")}
        self.samples = len(data)
        self.draws = False
        self._right: dict[str, float] = {}

    def metrics(self) -> dict[str, float]:
        """Return every metric that is a quotient of sums."""
        self._right = self._run()
        return self._right

    def warning(self) -> str:
        """Return a warning about the metrics that depend on how a split is cut into batches; empty if none does."""
        size = self._built.plan.micro_batch_size
        if self.draws or size < 2 or not self._metrics or self._built.job.loss_over == "batch":
            return ""
        halves = self._run(size // 2)
        found = [name for name in self._metrics if not _is_near(halves[name], self._right[name])]
        if found and not self.draws and self._run() == self._right:  # no state is kept between two evaluations
            floors = self.floors()
            found = [name for name in found if abs(halves[name] - self._right[name]) > floors[name]]
        if not found or self.draws:
            return ""
        name = found[0]
        return (
            f"metric {name} is not a sum over samples: it is {self._right[name]:.4g} in batches of {size} and "
            f"{halves[name]:.4g} in batches of {size // 2} (a mean that is returned with a count?), so it depends on "
            "eval.batch_size, in one process too. Hint: return (sum, count) over the samples of the batch."
        )

    def floors(self) -> dict[str, float]:
        """Return how far each metric moves when the weights move by the rounding of the forward's precision."""
        start, floors = ModelSnapshot(self._reference.model), dict.fromkeys(self._right, 0.0)
        kind = self._reference.spec.autocast
        for run in range(_RUNS):
            nudge_weights(
                self._reference.model, seed=run, least=0.0 if kind is None else _UNITS * torch.finfo(kind).eps
            )
            for name, value in self._run().items():
                floors[name] = max(floors[name], MARGIN * abs(value - self._right[name]))
            start.put_back()
        return floors

    def _run(self, size: int | None = None) -> dict[str, float]:
        reference, data, size = self._reference, self._data, size or self._built.plan.micro_batch_size
        sums: dict[str, list[float]] = {}
        reference.model.eval()
        seed = self._built.settings.seed
        split = self._built.data.split(data, name="eval_data")
        with torch.no_grad(), single_process():
            batches, self.draws = read_apart(split, lambda: _batches_of(data, size, self._collate, seed=seed))
            for number, (batch, rows) in enumerate(batches):
                seed_all(stream_key(seed, "evaluate", number))
                before = host_states()
                batch = reference.cast(batch)
                output, terms = reference.terms_of(batch, rows)
                pairs = {(name if len(terms) == 1 else f"loss/{name}"): pair for name, pair in terms.items()}
                with reference.precision():
                    pairs |= {name: metric(output, batch) for name, metric in self._metrics.items()}
                self.draws = self.draws or host_states() != before
                for name, pair in pairs.items():
                    total = sums.setdefault(name, [0.0, 0.0])
                    total[0], total[1] = total[0] + float(pair[0]), total[1] + float(pair[1])
        return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


def _batches_of(
    data: Any, size: int, collate: Callable[[list[Any]], Any], *, seed: int
) -> tuple[list[tuple[Any, int]], bool]:
    """Return every batch of a small split with its number of samples, and whether reading draws random numbers."""
    found, draws = [], False
    for start in range(0, len(data), size):
        part = range(start, min(start + size, len(data)))
        seed_all(stream_key(seed, "microbatch", 0, start))
        before = host_states()
        found.append((collate([data[i] for i in part]), len(part)))
        draws = draws or host_states() != before
    return found, draws


def _apart(found: float, right: float) -> float:
    """Return how far a metric is off; 0 if the rounding of the sums alone explains it."""
    none = not math.isfinite(found) and not math.isfinite(right)
    if none or math.isclose(found, right, rel_tol=_METRIC, abs_tol=_METRIC):
        return 0.0
    return abs(found - right) if math.isfinite(found - right) else math.inf


def _is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CUT, abs_tol=_CUT) or not math.isfinite(one - other)


def _some(data: Any, built: TrainingSetup) -> Any:
    """Return a subset of the split that is not divisible by the number of ranks; a DataLoader keeps its collation."""
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        data = data()
    if isinstance(data, DataLoader):
        plain = isinstance(data.sampler, SequentialSampler | RandomSampler | DistributedSampler)
        part = _some(data.dataset, built) if plain and not getattr(data.sampler, "replacement", False) else None
        return part and DataLoader(part, batch_size=data.batch_size, collate_fn=data.collate_fn)
    is_stream = isinstance(data, IterableDataset)
    if is_stream or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return None
    size = built.plan.micro_batch_size
    total = read_apart(built.data.split(data, name="eval_data"), lambda: len(data))
    return Subset(data, range(min(total, _EVALUATED_BATCHES * built.world.world_size * size + 1))) if total else None
