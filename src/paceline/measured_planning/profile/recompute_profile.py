"""Profile the activation memory of each part of a model, by policy of activation checkpointing and tp size."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from paceline.config.settings import Settings
from paceline.job import Job
from paceline.launch.failures.oom_detection import is_out_of_memory, trim_heap
from paceline.measured_planning.profile.batch_scaling_fit import fit_batch_scaling
from paceline.measured_planning.profile.sample_batches import (
    FEW_SAMPLES,
    MORE_SAMPLES,
    make_profiling_plan,
    read_samples,
    sequence_length,
    shorten_batch,
    shorter_lengths,
)
from paceline.measured_planning.profile.truncated_model import named_blocks
from paceline.measured_planning.simulated_ranks import SimulatedRanks
from paceline.planner.model_costs.model_profile import ActivationBytes, RecomputeProfile
from paceline.profiling.model_tracing.activation_tracker import ActivationTracker, ActivationUsage
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.step.forward_backward import backward, forward
from paceline.step.replica_context import ReplicaContext
from paceline.torch_internals.dispatch_modes import fake_process_group
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.build_training_setup import build_training_setup

_RANKS_PER_NODE = 8
REMAT_POLICIES = ("none", "selective", "full")
_UsageByPart = Mapping[str, ActivationUsage]  # by part of the model: a block, or the layers before or after the blocks


def recompute_profiles(
    job: Job, settings: Settings, *, tp_sizes: Sequence[int]
) -> dict[str, dict[str, RecomputeProfile]]:
    """Return the profiles by part of the model, then by value of `remat`.

    Policies that the model does not support are omitted.
    """
    length, profiles = sequence_length(job, settings), dict[str, dict[str, RecomputeProfile]]()
    for remat in REMAT_POLICIES:
        with skip_unsupported():  # a run with an unsupported policy reports it
            layout = "single" if remat == "none" else f"dp=1,remat={remat}"
            sizes = [
                (FEW_SAMPLES, None),
                (MORE_SAMPLES, None),
                *((FEW_SAMPLES, short) for short in shorter_lengths(length)),
            ]
            usages = _trace_activations(job, settings, layout, 1, sizes=sizes)
            tp_usages = [_trace_tp(job, settings, remat, tp_sizes, sequence=n) for n in (False, True)]
            for name in usages[0]:
                part_usages = [usage[name] for usage in usages]
                part_tp_usages = [{n: usage[name] for n, usage in by_size.items()} for by_size in tp_usages]
                profiles.setdefault(name, {})[remat] = _recompute_profile(part_usages, part_tp_usages, length)
    return {name: by_remat for name, by_remat in profiles.items() if "none" in by_remat}


@contextmanager
def skip_unsupported() -> Iterator[None]:
    """Suppress any error of the `with` block except out-of-memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise


def _trace_tp(
    job: Job, settings: Settings, remat: str, tp_sizes: Sequence[int], *, sequence: bool
) -> dict[int, _UsageByPart]:
    """Trace the smallest tp size, and the largest one within a typical node. Return the usage by tp size.

    A size that fails is omitted.
    """
    usages = {}
    for size in sorted({min(tp_sizes), max(n for n in tp_sizes if n <= _RANKS_PER_NODE)} if tp_sizes else ()):
        with skip_unsupported():
            layout = f"tp={size},remat={remat}{',sequence=true' if sequence else ''}"
            usages[size] = _trace_activations(job, settings, layout, size, sizes=[(FEW_SAMPLES, None)])[0]
    return usages


def _recompute_profile(
    usages: Sequence[ActivationUsage], tp_usages: Sequence[Mapping[int, ActivationUsage]], length: int | None
) -> RecomputeProfile:
    """Return the profile of one part. `usages` are by batch size, and `tp_usages` without and with sequence=true."""

    def fit_activation_bytes(field: str) -> ActivationBytes:
        values = [getattr(usage, field) for usage in usages]
        (whole, cut), (sequence_whole, sequence_cut) = (
            _replicated_and_divided(
                {size: getattr(usage, field) / values[0] for size, usage in by_size.items()} if values[0] else {}
            )
            for by_size in tp_usages
        )
        return ActivationBytes(
            amount=fit_batch_scaling(values, length),
            whole=whole, cut=cut, sequence_whole=sequence_whole, sequence_cut=sequence_cut,
        )  # fmt: skip

    return RecomputeProfile(kept=fit_activation_bytes("kept_bytes"), moment=fit_activation_bytes("transient_bytes"))


def _replicated_and_divided(remaining: Mapping[int, float]) -> tuple[float, float]:
    """Return the fraction of a part's bytes that every tp rank has, and the fraction that is divided among the ranks.

    `remaining` has, by tp size, a rank's bytes as a fraction of the bytes without tp.
    """
    if not remaining:
        return 1.0, 0.0
    few, more = min(remaining), max(remaining)
    if few == more:
        divided = (1 - remaining[few]) / (1 - 1 / few)
        return (1 - divided, divided) if divided <= 1 else (0.0, few * remaining[few])
    divided = (remaining[few] - remaining[more]) / (1 / few - 1 / more)
    replicated = remaining[few] - divided / few
    return (replicated, divided) if replicated >= 0 else (0.0, few * remaining[few])


def _trace_activations(
    job: Job, settings: Settings, layout: str, ranks: int, *, sizes: Sequence[tuple[int, int | None]]
) -> list[_UsageByPart]:
    """Return the activation usage of a microbatch of each size: a number of samples and, if shortened, a length.

    A first microbatch, which is not measured, creates the gradients.
    """
    plan = make_profiling_plan(settings, layout, ranks, samples=FEW_SAMPLES)
    simulated_ranks = SimulatedRanks(mesh=plan.mesh)
    active_trackers: list[ActivationTracker] = []

    def observe(*operation: Any) -> None:
        if active_trackers:
            active_trackers[0].observe(*operation)

    with nullcontext() if ranks == 1 else fake_process_group(ranks), preserve_rng(), simulated_ranks.run_lock:
        fake_mode = FakeExecutionMode(fake_storages=simulated_ranks.fake_storages, on_operation=observe)
        with fake_mode:
            fake_mode.comparisons_are_true = False
            setup = build_training_setup(
                job=job, settings=settings, plan=plan, world=simulated_ranks.world(0, backend=plan.backend)
            )
            fake_mode.comparisons_are_true = True
            blocks, batches = named_blocks(setup.model), [_batch(job, settings, *size) for size in sizes]
            setup.model.train()
            replica = setup.step.replica
            for recorder in replica.state_recorders:
                recorder.begin_step()
            replica.reducer.begin()
            _run_microbatch(replica, batches[0], samples=FEW_SAMPLES, tracker=None, active_trackers=active_trackers)
            trackers = [ActivationTracker(blocks=blocks) for _ in sizes]
            for tracker, batch, (samples, _) in zip(trackers, batches, sizes, strict=True):
                with tracker.track():
                    _run_microbatch(replica, batch, samples=samples, tracker=tracker, active_trackers=active_trackers)
            setup.close()
    trim_heap()
    return [tracker.usage for tracker in trackers]


def _batch(job: Job, settings: Settings, samples: int, length: int | None) -> Any:
    batch = read_samples(job, settings, samples=samples).micro[0].data
    return batch if length is None else shorten_batch(batch, sequence_length(job, settings), length)


def _run_microbatch(
    replica: ReplicaContext,
    batch: Any,
    *,
    samples: int,
    tracker: ActivationTracker | None,
    active_trackers: list[ActivationTracker],
) -> None:
    """Run forward and backward of a microbatch. `tracker`, if given, is active during them."""
    active_trackers += [tracker] if tracker is not None else []
    local_batch = replica.slice_microbatch(batch)
    terms = forward(replica, local_batch, step=0, index=0, num_samples=samples)
    loss = torch.stack([total for total, _ in terms.values()]).sum()
    del terms
    if tracker is not None:
        tracker.end_forward()
    backward(replica, loss, last=False, microbatch=local_batch)
    active_trackers.clear()
