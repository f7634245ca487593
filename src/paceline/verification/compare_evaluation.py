"""Compare the layout's evaluation with a one-process evaluation of the same weights. Each sample counts once."""

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

from paceline.checkpoint.state_outside_state_dict import state_dict_tensors
from paceline.data.reader_process import read_in_process
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.torch_internals.rng import cpu_rng_states, seed_all, stream_key
from paceline.trainer.evaluation.evaluator import EvaluatedSplit, Evaluator
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.noise_floor import MARGIN, ModelSnapshot, perturb_weights
from paceline.verification.reference.process_group_isolation import single_process
from paceline.verification.reference.reference import Reference
from paceline.verification.rung_result import RungResult

_EVALUATED_BATCHES = 4
_METRIC_TOLERANCE = 1e-6  # up to this distance, relative or absolute, rounding explains that a metric differs
_BATCH_SIZE_TOLERANCE = 1e-4  # the same for a metric that is computed with two batch sizes
_NUM_PERTURBED_RUNS = 3
# The least distance by which a perturbation moves every weight, in machine epsilons of the autocast type.
_PERTURBATION_EPS = 4.0


def evaluate_layout(setup: TrainingSetup) -> EvaluatedSplit | None:
    """Evaluate a few batches with the layout; return None if the data cannot be indexed."""
    data = _select_subset(setup.job.eval_data, setup)
    if data is None:
        return None
    evaluator = Evaluator(setup)
    size = setup.plan.micro_batch_size
    return evaluator.run(data, batch_size=size, name="eval_data")


def judge_evaluation(
    rung_result: RungResult,
    setup: TrainingSetup,
    reference: Reference,
    layout_evaluation: EvaluatedSplit,
    steps: int,
    layout_tensors: Mapping[str, Tensor],
) -> None:
    """Compare the layout's evaluation with a one-process evaluation of the same weights.

    `layout_tensors` are the layout's full weights and buffers after `steps` steps; the reference loads them first.
    """
    with torch.no_grad():
        for name, tensor in state_dict_tensors(reference.model).items():
            if name in layout_tensors:  # a tied parameter is stored under its first name
                copy_into(tensor, layout_tensors[name])
    reference_evaluation = _ReferenceEvaluation(setup, reference)
    expected = reference_evaluation.compute_metrics()
    if reference_evaluation.samples != layout_evaluation.samples:
        cause = f"evaluation saw {layout_evaluation.samples} samples instead of {reference_evaluation.samples}"
        rung_result.record_difference(step=steps, parameter="(evaluation)", cause=cause)
    rung_result.warning = reference_evaluation.batch_size_warning()
    distances = {
        name: _metric_distance(layout_evaluation.metrics.get(name, math.nan), value) for name, value in expected.items()
    }
    floors = (
        reference_evaluation.measure_floors()
        if any(distances.values()) and not reference_evaluation.draws_random_numbers
        else {}
    )
    for name, distance in distances.items():
        if distance and reference_evaluation.draws_random_numbers:
            rung_result.detail += (
                f" {name} was not compared: its evaluation draws random numbers, which differ on each rank."
            )
            continue
        rung_result.count_compared("metrics", 1)
        if distance and not distance <= floors[name]:
            value = layout_evaluation.metrics.get(name, math.nan)
            cause = (
                f"evaluation: {name} is {value:.6g} instead of {expected[name]:.6g} at equal weights: a "
                "different mean, or samples "
                "left out"
            )
            rung_result.record_difference(step=steps, parameter="(evaluation)", cause=cause)


class _ReferenceEvaluation:
    """A one-process evaluation that can be repeated with perturbed weights."""

    def __init__(self, setup: TrainingSetup, reference: Reference) -> None:
        self._setup, self._reference = setup, reference
        self._collate = setup.job.collate or torch.utils.data.default_collate
        data = _select_subset(setup.job.eval_data, setup)
        if isinstance(data, DataLoader):
            self._collate = setup.job.collate or data.collate_fn
            data = data.dataset
        self._data = data
        self._metrics = {n: m for n, m in (setup.job.metrics or {}).items() if not hasattr(m, "compute")}
        self.samples = len(data)
        self.draws_random_numbers = False
        self._expected: dict[str, float] = {}

    def compute_metrics(self) -> dict[str, float]:
        """Return the value of every metric that is a sum divided by a count, by name."""
        self._expected = self._evaluate()
        return self._expected

    def batch_size_warning(self) -> str:
        """Return a warning about the metrics that depend on how a split is cut into batches; empty if none does."""
        size = self._setup.plan.micro_batch_size
        if self.draws_random_numbers or size < 2 or not self._metrics or self._setup.job.loss_over == "batch":
            return ""
        halves = self._evaluate(size // 2)
        differing = [name for name in self._metrics if not _is_close(halves[name], self._expected[name])]
        if (
            differing and not self.draws_random_numbers and self._evaluate() == self._expected
        ):  # the metrics keep no state between two evaluations
            floors = self.measure_floors()
            differing = [name for name in differing if abs(halves[name] - self._expected[name]) > floors[name]]
        if not differing or self.draws_random_numbers:
            return ""
        name = differing[0]
        return (
            f"metric {name} is not a sum over samples: it is {self._expected[name]:.4g} in batches of {size} and "
            f"{halves[name]:.4g} in batches of {size // 2} (a mean that is returned with a count?), so it depends on "
            "eval.batch_size, in one process too. Hint: return (sum, count) over the samples of the batch."
        )

    def measure_floors(self) -> dict[str, float]:
        """Return the noise floor of each metric: its largest change when all weights are perturbed, times a margin."""
        start, floors = ModelSnapshot(self._reference.model), dict.fromkeys(self._expected, 0.0)
        autocast_dtype = self._reference.config.autocast
        for run in range(_NUM_PERTURBED_RUNS):
            perturb_weights(
                self._reference.model,
                seed=run,
                min_step=0.0 if autocast_dtype is None else _PERTURBATION_EPS * torch.finfo(autocast_dtype).eps,
            )
            for name, value in self._evaluate().items():
                floors[name] = max(floors[name], MARGIN * abs(value - self._expected[name]))
            start.restore()
        return floors

    def _evaluate(self, size: int | None = None) -> dict[str, float]:
        reference, data, size = self._reference, self._data, size or self._setup.plan.micro_batch_size
        sums: dict[str, list[float]] = {}
        reference.model.eval()
        seed = self._setup.settings.seed
        split = self._setup.data.split(data, name="eval_data")
        with torch.no_grad(), single_process():
            batches, self.draws_random_numbers = read_in_process(
                split, lambda: _collate_batches(data, size, self._collate, seed=seed)
            )
            for index, (batch, num_samples) in enumerate(batches):
                seed_all(stream_key(seed, "evaluate", index))
                generator_states = cpu_rng_states()
                batch = reference.cast(batch)
                output, terms = reference.forward_batch(batch, num_samples)
                pairs = {(name if len(terms) == 1 else f"loss/{name}"): pair for name, pair in terms.items()}
                with reference.autocast():
                    pairs |= {name: metric(output, batch) for name, metric in self._metrics.items()}
                self.draws_random_numbers = self.draws_random_numbers or cpu_rng_states() != generator_states
                for name, pair in pairs.items():
                    total = sums.setdefault(name, [0.0, 0.0])
                    total[0], total[1] = total[0] + float(pair[0]), total[1] + float(pair[1])
        return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


def _collate_batches(
    data: Any, size: int, collate: Callable[[list[Any]], Any], *, seed: int
) -> tuple[list[tuple[Any, int]], bool]:
    """Return every batch of a small split with its number of samples, and whether reading draws random numbers."""
    batches, draws = [], False
    for start in range(0, len(data), size):
        indices = range(start, min(start + size, len(data)))
        seed_all(stream_key(seed, "microbatch", 0, start))
        generator_states = cpu_rng_states()
        batches.append((collate([data[i] for i in indices]), len(indices)))
        draws = draws or cpu_rng_states() != generator_states
    return batches, draws


def _metric_distance(value: float, expected: float) -> float:
    """Return the distance of a metric from its expected value; 0 if rounding explains it, or if neither is finite."""
    both_nonfinite = not math.isfinite(value) and not math.isfinite(expected)
    if both_nonfinite or math.isclose(value, expected, rel_tol=_METRIC_TOLERANCE, abs_tol=_METRIC_TOLERANCE):
        return 0.0
    return abs(value - expected) if math.isfinite(value - expected) else math.inf


def _is_close(one: float, other: float) -> bool:
    """Return True if a metric is equal for two batch sizes up to rounding, or is not finite."""
    return math.isclose(one, other, rel_tol=_BATCH_SIZE_TOLERANCE, abs_tol=_BATCH_SIZE_TOLERANCE) or not math.isfinite(
        one - other
    )


def _select_subset(data: Any, setup: TrainingSetup) -> Any:
    """Return the first samples of the evaluation data; None if samples cannot be selected by index.

    If the data is large enough, the number of samples is not divisible by the number of ranks. A DataLoader keeps its
    collation.
    """
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        data = data()
    if isinstance(data, DataLoader):
        has_standard_sampler = isinstance(data.sampler, SequentialSampler | RandomSampler | DistributedSampler)
        subset = (
            _select_subset(data.dataset, setup)
            if has_standard_sampler and not getattr(data.sampler, "replacement", False)
            else None
        )
        return subset and DataLoader(subset, batch_size=data.batch_size, collate_fn=data.collate_fn)
    is_stream = isinstance(data, IterableDataset)
    if is_stream or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return None
    size = setup.plan.micro_batch_size
    total = read_in_process(setup.data.split(data, name="eval_data"), lambda: len(data))
    return Subset(data, range(min(total, _EVALUATED_BATCHES * setup.world.world_size * size + 1))) if total else None
