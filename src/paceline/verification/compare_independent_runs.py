"""The free-running rung: train the layout and one process independently, then compare their weights and evaluations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.state_outside_state_dict import state_dict_tensors
from paceline.console.formatting import plural
from paceline.data.dataset_properties import sample_checksums
from paceline.data.order.cursor import Cursor
from paceline.data.stream.iterable_loader import checksum
from paceline.step.local_sgd.site_synchronizer import SiteSynchronizer
from paceline.trainer.diagnostics.replica_check import averaged_names, find_replica_mismatch
from paceline.trainer.saving.local_sgd_state import get_site_synchronizer
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.compare_evaluation import evaluate_layout, judge_evaluation
from paceline.verification.compare_in_lockstep import ReportProgress, build_layout_loader, unchanged_weights_note
from paceline.verification.noise_floor import can_perturb, noise_margin, perturb_reference
from paceline.verification.reference.reference import Reference, RunPosition
from paceline.verification.reference.step_coverage import CoverageRecorder
from paceline.verification.rung_result import DIFFERENT, RungResult, judge_distance
from paceline.verification.tensor_distance import euclidean_distance, euclidean_norm, machine_epsilon

_MAX_PERTURBED_RUNS = 6
_MAX_SAMPLES, _MAX_SECONDS = 64, 1.0  # limits of the check that reads samples from all over the dataset
ContentChecksums = dict[tuple[int, int], int]  # checksums of the data, by (step, index of the microbatch)


@dataclass(frozen=True, kw_only=True)
class WeightDrift:
    """The allowed drift of a weight, as a fraction of how far training moved it, and the cause of a larger drift."""

    fraction: float = 1e-3
    cause: str = "the runs diverge over several steps although each single step agrees: optimizer state or schedule"


def compare_free_run(
    setup: TrainingSetup,
    *,
    reference: Reference | None,
    steps: int,
    report_progress: ReportProgress,
    drift: WeightDrift | None = None,
) -> RungResult:
    """Train the layout and one process for `steps` steps each, and compare data, weights and evaluation.

    The noise floor of a tensor is measured on one-process runs from perturbed weights; see `judge_drift`.
    """
    rung_result, requested_steps = RungResult(), steps
    initial_tensors: dict[str, Tensor] = {}
    reference_losses: list[float] = []
    reference_contents: ContentChecksums = {}
    if reference is not None:
        initial_tensors = {name: tensor.clone() for name, tensor in collect_tensors(reference).items()}
        recorder = CoverageRecorder(reference, replicas=setup.plan.replicas)
        reference_losses = _train_reference(reference, steps, contents=reference_contents, recorder=recorder)
        rung_result.coverage = recorder.as_json()
    steps = setup.world.share_json(len(reference_losses))
    report_progress(plural(steps, "step"))
    contents: ContentChecksums = {}
    results = [setup.step.run(step_input) for step_input in read_first_batches(setup, steps, contents)]
    setup.step.finish_pending()
    losses = [result.loss for result in results]
    _compare_contents(rung_result, setup, contents, reference_contents)
    replica_difference = find_replica_mismatch(setup)
    if replica_difference is not None:
        rung_result.record_difference(
            step=steps,
            parameter=replica_difference.name,
            cause=f"the replicas are no longer equal: {replica_difference}",
        )
    weights = gather_layout_weights(setup) | gather_layout_buffers(setup)
    with setup.step.synchronized_weights():
        layout_evaluation, layout_tensors = evaluate_layout(setup), gather_state_dict(setup)
    if reference is not None and steps < requested_steps:
        reason = "in one process, the gradient is not finite there, or a loss term has no targets"
        rung_result.record_uncovered(f"step {steps + 1} and later: {reason}")
    if reference is not None and steps:
        judge_drift(
            rung_result,
            weights,
            reference,
            partial(_train_perturbed, reference, steps),
            initial_tensors,
            steps,
            drift or WeightDrift(),
        )
        rung_result.detail = f"Loss {losses[-1]:.6g} against {reference_losses[-1]:.6g} after {plural(steps, 'step')}."
        if layout_evaluation is None and setup.job.eval_data is not None:
            rung_result.detail += " The evaluation was not compared: eval_data is a stream, or has its own sampler."
        if layout_evaluation is not None:
            judge_evaluation(rung_result, setup, reference, layout_evaluation, steps, layout_tensors)
    _compare_other_samples(rung_result, setup)
    shared_result: RungResult = RungResult(**setup.world.share_json(vars(rung_result)))
    return shared_result


def read_first_batches(setup: TrainingSetup, steps: int, contents: ContentChecksums) -> Any:
    """Yield the first `steps` batches of the run, and store checksums of their data in `contents`."""
    loader = build_layout_loader(setup, Cursor())
    try:
        for step_input in islice(iter(loader), steps):
            contents |= {
                (step_input.batch.next_cursor.step, micro.index): checksum(micro.data, 0) for micro in step_input.micro
            }
            yield step_input
    finally:
        loader.close()


def _compare_contents(
    rung_result: RungResult, setup: TrainingSetup, local_contents: ContentChecksums, expected: ContentChecksums
) -> None:
    """Compare the data of every microbatch with the data that one process read.

    Only a free run reads consecutive batches, and so exposes state that data workers keep between batches.
    """
    gathered = setup.world.gather_json([[*key, content] for key, content in local_contents.items()])
    contents = {(step, index): content for entries in gathered for step, index, content in entries}
    for (step, index), content in sorted(expected.items()):
        if contents.get((step, index), content) != content:
            cause = (
                f"data: the right samples with different contents than in one process, in microbatch {index}. The "
                "contents are equal if only this batch is read. So a dataset or collation depends on the data worker, "
                "or keeps state between samples"
            )
            rung_result.record_difference(step=step, parameter="(data)", cause=cause)
            return


def _compare_other_samples(rung_result: RungResult, setup: TrainingSetup) -> None:
    """Check that all ranks read equal samples in all parts of the dataset; the compared steps read only a few."""
    source, seed, world = setup.data.train, setup.settings.seed, setup.world
    if world.world_size == 1 or not source.is_indexed:
        return
    read_checksums = partial(sample_checksums, source, seed=seed, max_samples=_MAX_SAMPLES, seconds=_MAX_SECONDS)
    first_read = read_checksums(fixed_indices=None) if world.is_main else None
    indices = world.share_json(None if first_read is None else first_read[0])
    checksums = read_checksums(fixed_indices=indices)[1]
    is_repeatable = all(world.gather_json(first_read is None or first_read[1] == checksums))
    for index, *values in zip(indices, *world.gather_json(checksums), strict=True):
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None and is_repeatable:
            cause = (
                f"data: sample {index} differs between rank {other} and rank 0, in data that the compared steps did "
                "not read: a dataset that depends on the rank, or other files there"
            )
            rung_result.record_difference(step=1, parameter="(data)", cause=cause)
            return


def _train_reference(
    reference: Reference,
    steps: int,
    *,
    reverse_order: bool = False,
    contents: ContentChecksums | None = None,
    recorder: CoverageRecorder | None = None,
) -> list[float]:
    """Train one process for up to `steps` steps, and return the losses; store checksums of the data in `contents`.

    `recorder` records what the steps exercise.

    Training stops before a step with a non-finite gradient or with a loss term that has no target.
    """
    position, losses = RunPosition(steps_done=0, epoch=0, batch_start=0), []
    for _ in range(steps):
        microbatches = reference.read_microbatches(position)
        if contents is not None:
            contents |= {
                (position.step_number, index): checksum(micro.data, 0) for index, micro in enumerate(microbatches)
            }
        statistics = reference.copy_statistics()
        gradient = reference.compute_gradient(position, microbatches=microbatches, reverse_order=reverse_order)
        if gradient.empty_terms or not all(bool(torch.isfinite(value).all()) for value in gradient.total.values()):
            reference.restore_statistics(statistics)
            break
        if recorder is not None:
            recorder.record_gradient(gradient, position=position, num_microbatches=len(microbatches))
            recorder.record_update(gradient.total)
        reference.update(gradient.total)
        losses.append(gradient.loss)
        position = reference.next_position(position, sum(map(len, gradient.samples)))
    return losses


def _train_perturbed(reference: Reference, steps: int, seed: int) -> dict[str, Tensor]:
    """Train one process from perturbed weights, with microbatches in reverse order; return the trained tensors.

    Buffers come from a run in the usual order, because running statistics depend on the order.
    """
    tensors: dict[str, Tensor] = {}
    for reverse_order in (True, False) if _named_buffers(reference) else (True,):
        perturbed = reference.rebuild()
        if can_perturb(
            perturbed.without_compression(), position=RunPosition(steps_done=0, epoch=0, batch_start=0), seed=seed
        ):
            perturb_reference(perturbed, seed=seed)
        _train_reference(perturbed, steps, reverse_order=reverse_order)
        tensors |= (
            trained_tensors(perturbed) | _named_buffers(perturbed) if reverse_order else _named_buffers(perturbed)
        )
    return tensors


def judge_drift(
    rung_result: RungResult,
    tensors: Mapping[str, Tensor],
    reference: Reference,
    train_perturbed: Callable[[int], Mapping[str, Tensor]],
    initial_tensors: Mapping[str, Tensor],
    steps: int,
    drift: WeightDrift,
) -> None:
    """Record the verdict on each of the layout's tensors after `steps` steps.

    The noise floor of a tensor is the largest of: its drift in perturbed one-process runs, a fraction of how far
    training moved it, and accumulated rounding. `train_perturbed(seed)` returns the tensors of a perturbed run. Several
    runs are tried: under Adam, an element with a tiny gradient moves by a full step, and not every run flips its sign.
    """
    expected = collect_tensors(reference)
    distances = {name: euclidean_distance(tensor, expected[name]) for name, tensor in tensors.items()}
    movements = {name: euclidean_distance(expected[name], initial_tensors[name]) for name in tensors}
    floors = {
        n: max(drift.fraction * movements[n], _accumulated_rounding(t, expected[n], steps)) for n, t in tensors.items()
    }
    for seed in range(1, 1 + _MAX_PERTURBED_RUNS):
        perturbed = train_perturbed(seed)
        floors = {
            n: max(floors[n], noise_margin(t) * euclidean_distance(perturbed[n], expected[n]))
            for n, t in tensors.items()
        }
        if not any(judge_distance(distances[name], floors[name]) == DIFFERENT for name in tensors):
            break
    ratios: dict[str, float] = {}
    for name, floor in floors.items():
        verdict = judge_distance(distances[name], floor)
        rung_result.record(verdict, difference=distances[name], floor=floor)
        if verdict == DIFFERENT:
            ratios[name] = distances[name] / max(floor, 1e-300)
    has_changed = {name: movement > 0.0 for name, movement in movements.items() if name in reference.weights()}
    averages, buffers = len(reference.average.tensors), len(tensors.keys() & _named_buffers(reference).keys())
    rung_result.count_compared("weights", len(tensors) - averages - buffers)
    for kind, number in (("averages", averages), ("buffers", buffers)):
        if number:
            rung_result.count_compared(kind, number)
    if not any(has_changed.values()):
        rung_result.record_uncovered(unchanged_weights_note(has_changed, steps=steps, lr_rises=False))
    if ratios:
        name = max(ratios, key=lambda key: ratios[key])
        has_different_weights = any(name in ratios for name in reference.weights())
        average_cause = "the weights agree but their average does not: a different decay, or skipped steps"
        buffer_cause = (
            "the weights agree but a buffer does not, although it agrees in each single step: it "
            "is written between steps"
        )
        cause = (
            drift.cause
            if has_different_weights
            else buffer_cause
            if name in _named_buffers(reference)
            else average_cause
        )
        rung_result.record_difference(step=steps, parameter=name, cause=f"{cause} ({len(ratios)} of {len(tensors)})")


def _accumulated_rounding(tensor: Tensor, expected: Tensor, steps: int) -> float:
    """Return how far half-precision rounding may move a tensor in `steps` steps; 0 for wider types."""
    return machine_epsilon(tensor) * euclidean_norm(expected) * steps**0.5 if tensor.dtype.itemsize < 4 else 0.0


def trained_tensors(reference: Reference) -> dict[str, Tensor]:
    """Return the reference's weights and their moving averages."""
    average = reference.average.tensors
    return reference.weights() | dict(zip(averaged_names(list(average)), average.values(), strict=True))


def collect_tensors(reference: Reference) -> dict[str, Tensor]:
    """Return the reference's weights, moving averages and buffers."""
    return trained_tensors(reference) | _named_buffers(reference)


def _named_buffers(reference: Reference) -> dict[str, Tensor]:
    return {name: buffer.detach() for name, buffer in reference.model.named_buffers()}


def gather_layout_buffers(setup: TrainingSetup) -> dict[str, Tensor]:
    """Gather the layout's full buffers; none for local SGD, where each site has its own."""
    if get_site_synchronizer(setup) is not None:
        return {}
    sharded = setup.weights
    names = [name for name in sharded.names if name not in sharded.parameter_names]
    return {name: sharded.gather_full_tensor(name, sharded.local_tensors[name].tensor) for name in names}


def gather_layout_weights(setup: TrainingSetup) -> dict[str, Tensor]:
    """Gather the layout's full weights and their moving averages; for local SGD, the weights of every site instead."""
    sharded, ema = setup.weights, setup.update.ema
    local_weights = {
        name: local.tensor for name, local in sharded.local_tensors.items() if name in sharded.parameter_names
    }
    gathered = {name: sharded.gather_full_tensor(name, tensor) for name, tensor in local_weights.items()}
    sites = get_site_synchronizer(setup)
    if sites is not None:
        return _gather_site_weights(gathered, setup, sites)
    if ema is not None:
        averages = dict(zip(ema.names, ema.averages, strict=True))
        names = [name for name in local_weights if sharded.local_tensors[name].dtype.is_floating_point]
        gathered |= {
            average_name: sharded.gather_full_tensor(name, averages.get(name))
            for name, average_name in zip(names, averaged_names(names), strict=True)
        }
    return gathered


def _gather_site_weights(
    local_weights: Mapping[str, Tensor], setup: TrainingSetup, sites: SiteSynchronizer
) -> dict[str, Tensor]:
    """Gather every site's weights, and the synchronized weights."""
    gathered: dict[str, Tensor] = {}
    for name, tensor in local_weights.items():
        for site in range(sites.peers.world_size):
            gathered[f"{name} of site {site}"] = sites.peers.broadcast(tensor.clone(), source=site)
    synced_weights = {
        member.name: tensor.detach()
        for fragment in sites.fragments
        for member, tensor in zip(fragment.members, fragment.synchronized, strict=True)
    }
    for name in setup.optim_shards.names:
        gathered[f"{name} (synchronized)"] = setup.optim_shards.gather_full_tensor(name, synced_weights.get(name))
    return gathered


def gather_state_dict(setup: TrainingSetup) -> dict[str, Tensor]:
    """Gather the full tensors in the `state_dict` of any rank. With expert parallelism, no rank has all of them."""
    sharded = setup.weights
    listed = {name for names in setup.world.gather_json(list(state_dict_tensors(setup.model))) for name in names}
    return {
        name: sharded.gather_full_tensor(name, sharded.local_tensors[name].tensor)
        for name in sharded.names
        if name in listed
    }
