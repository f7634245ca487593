"""Memory profiles of a job's parts under each activation checkpointing policy and tp, traced on fake tensors."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from paceline.config.settings import Settings
from paceline.job import Job
from paceline.launch.failures.oom_detection import is_out_of_memory, trim_heap
from paceline.measured_planning.profile.sample_batches import (
    FEW,
    MORE,
    amount_through,
    length_of,
    lengths_of,
    plan_of,
    samples_of,
    shorten_batch,
)
from paceline.measured_planning.profile.truncated_model import blocks_of
from paceline.measured_planning.simulated_ranks import SimulatedRanks
from paceline.planner.model_costs.model_profile import ActivationBytes, RecomputeProfile
from paceline.profiling.model_tracing.activation_tracker import ActivationTracker, ActivationUsage
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.step.forward_backward import backward, forward
from paceline.step.replica_context import ReplicaContext
from paceline.torch_internals.dispatch_modes import fake_process_group
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.build_training_setup import build_training_setup

_NODE = 8
REMATS = ("none", "selective", "full")
_Seen = Mapping[str, ActivationUsage]


def recompute_profiles(
    job: Job, settings: Settings, *, tp_sizes: Sequence[int]
) -> dict[str, dict[str, RecomputeProfile]]:
    """Return the profiles by part, then by `remat`; policies that the model does not support are omitted."""
    length, found = length_of(job, settings), dict[str, dict[str, RecomputeProfile]]()
    for remat in REMATS:
        with skip_unsupported():  # an unsupported policy is refused when it is requested
            alone = "single" if remat == "none" else f"dp=1,remat={remat}"
            sizes = [(FEW, None), (MORE, None), *((FEW, short) for short in lengths_of(length))]
            each = _lives(job, settings, alone, 1, sizes=sizes)
            splits = [_splits(job, settings, remat, tp_sizes, sequence=n) for n in (False, True)]
            for name in each[0]:
                seen, tp = [one[name] for one in each], [{n: one[name] for n, one in few.items()} for few in splits]
                found.setdefault(name, {})[remat] = _way(seen, tp, length)
    return {name: ways for name, ways in found.items() if "none" in ways}


@contextmanager
def skip_unsupported() -> Iterator[None]:
    """Suppress an error in the block, unless memory ran out."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise


def _splits(job: Job, settings: Settings, remat: str, tp_sizes: Sequence[int], *, sequence: bool) -> dict[int, _Seen]:
    """Return traces with tp on the fewest ranks and on those of a usual node, if the model can be split so."""
    found = {}
    for size in sorted({min(tp_sizes), max(n for n in tp_sizes if n <= _NODE)} if tp_sizes else ()):
        with skip_unsupported():
            words = f"tp={size},remat={remat}{',sequence=true' if sequence else ''}"
            found[size] = _lives(job, settings, words, size, sizes=[(FEW, None)])[0]
    return found


def _way(
    seen: Sequence[ActivationUsage], splits: Sequence[Mapping[int, ActivationUsage]], length: int | None
) -> RecomputeProfile:
    def holding(what: str) -> ActivationBytes:
        values = [getattr(one, what) for one in seen]
        (whole, cut), (sequence_whole, sequence_cut) = (
            _parts({size: getattr(one, what) / values[0] for size, one in few.items()} if values[0] else {})
            for few in splits
        )
        return ActivationBytes(
            amount=amount_through(values, length),
            whole=whole, cut=cut, sequence_whole=sequence_whole, sequence_cut=sequence_cut,
        )  # fmt: skip

    return RecomputeProfile(kept=holding("kept_bytes"), moment=holding("moment_bytes"))


def _parts(left: Mapping[int, float]) -> tuple[float, float]:
    """Return the replicated and the divided fraction, from the fraction that each rank has at each tp size."""
    if not left:
        return 1.0, 0.0
    few, more = min(left), max(left)
    if few == more:
        cut = (1 - left[few]) / (1 - 1 / few)
        return (1 - cut, cut) if cut <= 1 else (0.0, few * left[few])
    cut = (left[few] - left[more]) / (1 / few - 1 / more)
    whole = left[few] - cut / few
    return (whole, cut) if whole >= 0 else (0.0, few * left[few])


def _lives(
    job: Job, settings: Settings, layout: str, ranks: int, *, sizes: Sequence[tuple[int, int | None]]
) -> list[_Seen]:
    """Trace a microbatch of each number of samples and length, after a first one that creates the gradients."""
    plan = plan_of(settings, layout, ranks, samples=FEW)
    scene = SimulatedRanks(mesh=plan.mesh)
    heard: list[ActivationTracker] = []

    def see(*told: Any) -> None:
        if heard:
            heard[0].see(*told)

    with nullcontext() if ranks == 1 else fake_process_group(ranks), preserve_rng(), scene.baton:
        hollow = FakeExecutionMode(emptied=scene.emptied, see=see)
        with hollow:
            hollow.holds = False
            built = build_training_setup(
                job=job, settings=settings, plan=plan, world=scene.world(0, backend=plan.backend)
            )
            hollow.holds = True
            blocks, batches = blocks_of(built.model), [_batch(job, settings, *size) for size in sizes]
            built.model.train()
            replica = built.step.replica
            for tape in replica.tapes:
                tape.begin()
            replica.reducer.begin()
            _pass(replica, batches[0], samples=FEW, lives=None, heard=heard)
            found = [ActivationTracker(blocks=blocks) for _ in sizes]
            for lives, batch, (samples, _) in zip(found, batches, sizes, strict=True):
                with lives.running():
                    _pass(replica, batch, samples=samples, lives=lives, heard=heard)
            built.close()
    trim_heap()
    return [lives.lives for lives in found]


def _batch(job: Job, settings: Settings, samples: int, length: int | None) -> Any:
    batch = samples_of(job, settings, samples=samples).micro[0].data
    return batch if length is None else shorten_batch(batch, length_of(job, settings), length)


def _pass(
    replica: ReplicaContext,
    batch: Any,
    *,
    samples: int,
    lives: ActivationTracker | None,
    heard: list[ActivationTracker],
) -> None:
    heard += [lives] if lives is not None else []
    portion = replica.portion(batch)
    terms = forward(replica, portion, step=0, index=0, num_samples=samples)
    loss = torch.stack([total for total, _ in terms.values()]).sum()
    del terms
    if lives is not None:
        lives.turn()
    backward(replica, loss, last=False, portion=portion)
    heard.clear()
