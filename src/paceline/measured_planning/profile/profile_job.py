"""The profile of a job's model for the planner, traced on fake tensors."""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.config.settings import Settings
from paceline.errors import LayoutError, PacelineError, as_refused
from paceline.job import Job
from paceline.launch.failures.oom_detection import is_out_of_memory, trim_heap
from paceline.measured_planning.profile.recompute_profile import recompute_profiles
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
from paceline.measured_planning.profile.truncated_model import KEPT, blocks_of, restore_depth, truncate_depth
from paceline.measured_planning.simulated_ranks import SimulatedRanks
from paceline.parallel.expert_parallel.discovery import find_experts
from paceline.planner.advice.numeric_options import with_compiled_blocks
from paceline.planner.cost.layout_candidate import MICRO_BATCH_KEY
from paceline.planner.model_costs.model_profile import (
    BatchScaling,
    LayerProfile,
    ModelProfile,
    OptimizerFootprint,
    RecomputeProfile,
)
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.profiling.model_tracing.flop_counter import FIRST, LAST, FlopCounter, LayerCounts
from paceline.profiling.model_tracing.memory_tracker import memory_at_rest
from paceline.step.forward_backward import backward, forward
from paceline.torch_internals.dispatch_modes import fake_process_group
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The costs of one forward under a layout, by part."""

    costs: dict[str, LayerCounts]
    parameters: dict[str, int]
    tensors: dict[str, tuple[int, ...]]
    frozen: dict[str, int]
    lookups: dict[str, int]
    buffer_bytes: int
    state_bytes: int


def profile_model(job: Job, settings: Settings, *, most_ranks: int) -> ModelProfile:
    """Return the profile for the planner. Three blocks of each list of equal blocks are traced, without compilation.

    Raises:
        PacelineError: the job can't be traced.
    """
    plain = replace(settings, train=replace(settings.train, compile=False))
    found = _learnt_shortly(job, plain, most_ranks=most_ranks)
    return with_compiled_blocks(found) if settings.train.compile else found


def _learnt_shortly(job: Job, settings: Settings, *, most_ranks: int) -> ModelProfile:
    """Return the profile from a truncated model if that is sufficient, else from the whole one."""
    short, depths = truncate_depth(job)
    try:
        found = _learnt(short, settings, most_ranks=most_ranks)
    except Exception:
        if short is job:
            raise
        return _learnt(job, settings, most_ranks=most_ranks)
    if short is job or len(found.blocks) != sum(min(depth, KEPT) for depth in depths):
        return found
    return replace(found, blocks=tuple(restore_depth(found.blocks, depths)))


def _learnt(job: Job, settings: Settings, *, most_ranks: int) -> ModelProfile:
    length = length_of(job, settings)
    few, more = (_look(job, settings, "single", 1, samples=n) for n in (FEW, MORE))
    shorter = [_look(job, settings, "single", 1, samples=FEW, length=n) for n in lengths_of(length)]
    refused: dict[str, str] = {}
    split = _tried(lambda: _look(job, settings, "tp", 2, samples=FEW), refused, "tp")
    _tried(lambda: _look(job, settings, "single", 1, samples=1), refused, f"{MICRO_BATCH_KEY}=1")
    sizes = _sizes(job, settings, split, most_ranks) if split is not None else {}
    tp_sizes = tuple(sizes)
    names = [name for name in few.costs if name not in (FIRST, LAST)]
    if not names:
        refused |= {"pp": "no chain of blocks was found", "remat": "no block repeats"}
    experts = _experts(job, settings)
    if not experts:
        refused["ep"] = "the model has no experts to split"
    if length is None:
        refused["cp"] = "the job does not say which dimension of its batch is the sequence"
    ways = recompute_profiles(job, settings, tp_sizes=tp_sizes)
    parts = {
        name: _part(name, few, more, shorter, split, length, experts.get(name, 0), ways.get(name, {}), sizes)
        for name in few.costs
    }
    trained = sum(few.parameters.values()) - sum(few.frozen.values())
    return ModelProfile(
        name=job.name or "",
        first=parts[FIRST],
        blocks=tuple(parts[name] for name in names),
        last=parts[LAST],
        optimizer=OptimizerFootprint(name="optimizer", state_bytes=few.state_bytes / max(1, trained)),
        global_batch_size=settings.train.global_batch_size or job.global_batch_size,
        length=length or 1,
        precision=settings.train.precision,
        tp_sizes=tp_sizes,
        cp_sizes=_powers(min(most_ranks, (length or 0) // 2)),
        ep_sizes=tuple(n for n in _powers(most_ranks) if experts and not experts["count"] % n),
        refused=refused,
    )


def _tried(call: Callable[[], Any], refused: dict[str, str], axis: str) -> Any:
    try:
        return call()
    except PacelineError as error:
        refused[axis] = error.what
    except Exception as error:  # of the job's own code: other axes may work
        if is_out_of_memory(error):
            raise
        refused[axis] = as_refused(error)
    return None


def _sizes(job: Job, settings: Settings, split: _Run, most: int) -> dict[int, dict[str, int]]:
    """Return a rank's parameters for each tp size that works: powers of two, up to the first that fails."""
    found = {2: split.parameters} if most > 1 else {}
    for size in _powers(most)[1:]:
        seen = _tried(partial(_look, job, settings, "tp", size, samples=FEW), {}, "tp")
        if seen is None:
            break
        found[size] = seen.parameters
    return found


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(1, max(1, most).bit_length()) if 1 << n <= most)


def _look(job: Job, settings: Settings, layout: str, ranks: int, *, samples: int, length: int | None = None) -> _Run:
    """Trace one forward of a few samples."""
    found = _looked(job, settings, layout, ranks, samples=samples, length=length)
    gc.collect()  # a graph has reference cycles, and its integer tensors are real memory
    trim_heap()
    return found


def _looked(job: Job, settings: Settings, layout: str, ranks: int, *, samples: int, length: int | None) -> _Run:
    plan = plan_of(settings, layout, ranks, samples=samples)
    scene = SimulatedRanks(mesh=plan.mesh)
    alone = ranks == 1
    tallies: list[FlopCounter] = []

    def see(*heard: Any) -> None:
        if tallies:
            tallies[0].see(*heard)

    with nullcontext() if alone else fake_process_group(ranks), preserve_rng(), scene.baton:
        hollow = FakeExecutionMode(emptied=scene.emptied, see=see)
        with hollow:
            hollow.holds = False
            built = build_training_setup(
                job=job, settings=settings, plan=plan, world=scene.world(0, backend=plan.backend)
            )
            hollow.holds = True
            given = samples_of(job, settings, samples=samples)
            batch = given.micro[0].data
            batch = batch if length is None else shorten_batch(batch, length_of(job, settings), length)
            tally = FlopCounter(built.model, blocks=blocks_of(built.model))
            built.model.train()
            replica = built.step.replica
            for tape in replica.tapes:
                tape.begin()
            replica.reducer.begin()
            with tally.running():
                tallies.append(tally)
                terms = forward(replica, replica.portion(batch), step=0, index=0, num_samples=samples)
                tallies.clear()
            state = _state_bytes(built, terms) if alone and length is None else 0
            every = _parameters(built.model)
            found = _Run(
                costs=tally.costs,
                parameters={name: sum(p.numel() for p in own) for name, own in every.items()},
                tensors={name: tuple(p.numel() for p in own) for name, own in every.items()},
                frozen={name: sum(p.numel() for p in own if not p.requires_grad) for name, own in every.items()},
                lookups=_lookups(built.model, every),
                buffer_bytes=sum(buffer.nbytes for buffer in built.model.buffers()),
                state_bytes=state,
            )
            built.close()
    return found


def _state_bytes(built: TrainingSetup, terms: Any) -> int:
    """Return the bytes of optimizer state after an update."""
    replica = built.step.replica
    backward(replica, torch.stack([total for total, _ in terms.values()]).sum(), last=True)
    replica.reducer.finish(divisor=1.0)
    for optimizer in replica.update.optimizers:
        optimizer.step()
    return memory_at_rest(model=built.model, optimizers=replica.update.optimizers).optimizer


def _parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each part; a tied parameter belongs to its first part."""
    blocks = list(blocks_of(model))
    found: dict[str, list[nn.Parameter]] = {name: [] for name in (FIRST, *blocks, LAST)}
    seen = False
    for name, parameter in model.named_parameters():
        home = next((block for block in blocks if name.startswith(f"{block}.")), None)
        seen = seen or home is not None
        found[home or (LAST if seen else FIRST)].append(parameter)
    return found


def _lookups(model: nn.Module, every: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, int]:
    """Return the elements of each part's tables that only embeddings use: a tied head multiplies by its table."""
    tables, others = set[int](), set[int]()
    for module in model.modules():
        found = tables if isinstance(module, nn.Embedding | nn.EmbeddingBag) else others
        found |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return {name: sum(p.numel() for p in own if id(p) in tables - others) for name, own in every.items()}


def _experts(job: Job, settings: Settings) -> dict[str, int]:
    """Return the elements of experts by block, and how many experts there are (`count`)."""
    with FakeExecutionMode() as hollow, preserve_rng():
        hollow.holds = False
        model = job.model()
    try:
        found = find_experts(model)
    except LayoutError:
        return {}
    sums = {"count": found[0].count}
    for one in found:
        home = next((block for block in blocks_of(model) if one.name.startswith(f"{block}.")), FIRST)
        sums[home] = sums.get(home, 0) + sum(p.numel() for p in one.module.parameters())
    return sums


def _part(
    name: str,
    few: _Run,
    more: _Run,
    shorter: Sequence[_Run],
    split: _Run | None,
    length: int | None,
    experts: int,
    ways: Mapping[str, RecomputeProfile],
    sizes: Mapping[int, Mapping[str, int]],
) -> LayerProfile:
    def amount(what: str) -> BatchScaling:
        values = [getattr(run.costs[name], what) for run in (few, more, *shorter)]
        return amount_through(values, length)

    own, total = few.costs[name], few.parameters[name]
    kept, cut = amount("saved_bytes"), 0
    fraction, tp_bytes, calls = 0.0, BatchScaling(), 0
    if split is not None:
        cut = min(total - experts, 2 * (total - split.parameters[name]))
        there = split.costs[name]
        fraction = min(1.0, max(0.0, 2 - 2 * there.saved_bytes / own.saved_bytes)) if own.saved_bytes else 0.0
        tp_bytes, calls = (
            amount_through([there.reduced_bytes, there.reduced_bytes * MORE / FEW], length),
            there.reduced_calls,
        )
    moment = amount("largest_bytes")
    return LayerProfile(
        name={FIRST: "before", LAST: "after"}.get(name, name),
        whole_parameters=total - experts - cut,
        split_parameters=cut,
        expert_parameters=experts,
        frozen_parameters=few.frozen[name],
        lookup_parameters=few.lookups[name],
        buffer_bytes=few.buffer_bytes if name == FIRST else 0,
        matmul_flops=amount("products"),
        attention_flops=amount("attention"),
        masked_flops=amount("masked"),
        moved_bytes=amount("moved_bytes"),
        fused_bytes=amount("fused_bytes"),
        saved_bytes=kept.scaled_by(1 - fraction),
        split_saved_bytes=kept.scaled_by(fraction),
        selective_saved_bytes=amount("product_bytes"),
        output_bytes=amount("output_bytes"),
        peak_bytes=replace(moment, fixed=0.0).scaled_by(2),
        tp_bytes=tp_bytes,
        tp_calls=calls,
        ep_bytes=amount("output_bytes").scaled_by(2) if experts else BatchScaling(),
        tensors=few.tensors[name],
        tp_parameters=tuple((size, held[name]) for size, held in sizes.items()),
        ways=ways,
    )
