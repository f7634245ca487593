"""Profile a job's model for the planner: trace it on fake tensors."""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.config.settings import Settings
from paceline.errors import LayoutError, PacelineError, one_line_message
from paceline.job import Job
from paceline.launch.failures.oom_detection import is_out_of_memory, trim_heap
from paceline.measured_planning.profile.batch_scaling_fit import fit_batch_scaling
from paceline.measured_planning.profile.recompute_profile import recompute_profiles
from paceline.measured_planning.profile.sample_batches import (
    FEW_SAMPLES,
    MORE_SAMPLES,
    make_profiling_plan,
    read_samples,
    sequence_length,
    shorten_batch,
    shorter_lengths,
)
from paceline.measured_planning.profile.truncated_model import KEPT_BLOCKS, named_blocks, restore_depth, truncate_depth
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
from paceline.profiling.model_tracing.flop_counter import AFTER_BLOCKS, BEFORE_BLOCKS, FlopCounter, LayerCounts
from paceline.profiling.model_tracing.memory_tracker import memory_at_rest
from paceline.step.forward_backward import backward, forward
from paceline.torch_internals.dispatch_modes import fake_process_group
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup


@dataclass(frozen=True, kw_only=True)
class _TracedForward:
    """The costs of one traced forward on a rank of a layout, and the parameters, by part of the model.

    `parameters` are numbers of elements, and `tensors` are the numbers of elements of each tensor. `frozen` and
    `lookups` are the elements of frozen parameters and of embedding tables. `buffer_bytes` and `state_bytes` (optimizer
    state) are those of the whole model.
    """

    costs: dict[str, LayerCounts]
    parameters: dict[str, int]
    tensors: dict[str, tuple[int, ...]]
    frozen: dict[str, int]
    lookups: dict[str, int]
    buffer_bytes: int
    state_bytes: int


def profile_model(job: Job, settings: Settings, *, max_ranks: int) -> ModelProfile:
    """Return the profile for the planner.

    Only three blocks of each list of equal blocks are traced. The effect of compilation is estimated afterwards.

    Raises:
        PacelineError: the job can't be traced.
    """
    plain = replace(settings, train=replace(settings.train, compile=False))
    profile = _profile_truncated(job, plain, max_ranks=max_ranks)
    return with_compiled_blocks(profile) if settings.train.compile else profile


def _profile_truncated(job: Job, settings: Settings, *, max_ranks: int) -> ModelProfile:
    """Return the profile of the truncated model with its blocks repeated, or of the whole model if truncation fails."""
    truncated, depths = truncate_depth(job)
    try:
        profile = _profile_model(truncated, settings, max_ranks=max_ranks)
    except Exception:
        if truncated is job:
            raise
        return _profile_model(job, settings, max_ranks=max_ranks)
    if truncated is job or len(profile.blocks) != sum(min(depth, KEPT_BLOCKS) for depth in depths):
        return profile
    return replace(profile, blocks=tuple(restore_depth(profile.blocks, depths)))


def _profile_model(job: Job, settings: Settings, *, max_ranks: int) -> ModelProfile:
    """Return the profile of a model, all of whose blocks are traced."""
    length = sequence_length(job, settings)
    few, more = (_trace_forward(job, settings, "single", 1, samples=n) for n in (FEW_SAMPLES, MORE_SAMPLES))
    shorter = [
        _trace_forward(job, settings, "single", 1, samples=FEW_SAMPLES, length=n) for n in shorter_lengths(length)
    ]
    refused: dict[str, str] = {}
    tp_run = _try_or_refuse(lambda: _trace_forward(job, settings, "tp", 2, samples=FEW_SAMPLES), refused, "tp")
    _try_or_refuse(lambda: _trace_forward(job, settings, "single", 1, samples=1), refused, f"{MICRO_BATCH_KEY}=1")
    tp_parameters = _parameters_by_tp_size(job, settings, tp_run, max_ranks) if tp_run is not None else {}
    tp_sizes = tuple(tp_parameters)
    names = [name for name in few.costs if name not in (BEFORE_BLOCKS, AFTER_BLOCKS)]
    if not names:
        refused |= {"pp": "no chain of blocks was found", "remat": "no block repeats"}
    experts = _expert_parameters(job, settings)
    if not experts:
        refused["ep"] = "the model has no experts to split"
    if length is None:
        refused["cp"] = "the job does not say which dimension of its batch is the sequence"
    recompute = recompute_profiles(job, settings, tp_sizes=tp_sizes)
    parts = {
        name: _layer_profile(
            name, few, more, shorter, tp_run, length, experts.get(name, 0), recompute.get(name, {}), tp_parameters
        )
        for name in few.costs
    }
    trained = sum(few.parameters.values()) - sum(few.frozen.values())
    return ModelProfile(
        name=job.name or "",
        first=parts[BEFORE_BLOCKS],
        blocks=tuple(parts[name] for name in names),
        last=parts[AFTER_BLOCKS],
        optimizer=OptimizerFootprint(name="optimizer", state_bytes=few.state_bytes / max(1, trained)),
        global_batch_size=settings.train.global_batch_size or job.global_batch_size,
        length=length or 1,
        precision=settings.train.precision,
        tp_sizes=tp_sizes,
        cp_sizes=_powers_of_two(min(max_ranks, (length or 0) // 2)),
        ep_sizes=tuple(n for n in _powers_of_two(max_ranks) if experts and not experts["count"] % n),
        refused=refused,
    )


def _try_or_refuse(call: Callable[[], Any], refused: dict[str, str], option: str) -> Any:
    """Return the result of `call`. If it fails, record the reason in `refused[option]`, and return None.

    `option` is an axis or an option that layouts then can't have, such as `tp`.
    """
    try:
        return call()
    except PacelineError as error:
        refused[option] = error.what
    except Exception as error:  # an error in the job's own code: layouts without this option may work
        if is_out_of_memory(error):
            raise
        refused[option] = one_line_message(error)
    return None


def _parameters_by_tp_size(
    job: Job, settings: Settings, tp_run: _TracedForward, max_ranks: int
) -> dict[int, dict[str, int]]:
    """Return a rank's parameters by tp size, then by part. Sizes are powers of two, up to the first that fails."""
    parameters = {2: tp_run.parameters} if max_ranks > 1 else {}
    for size in _powers_of_two(max_ranks)[1:]:
        run = _try_or_refuse(partial(_trace_forward, job, settings, "tp", size, samples=FEW_SAMPLES), {}, "tp")
        if run is None:
            break
        parameters[size] = run.parameters
    return parameters


def _powers_of_two(limit: int) -> tuple[int, ...]:
    """Return the powers of two from 2 to `limit`."""
    return tuple(1 << n for n in range(1, max(1, limit).bit_length()) if 1 << n <= limit)


def _trace_forward(
    job: Job, settings: Settings, layout: str, ranks: int, *, samples: int, length: int | None = None
) -> _TracedForward:
    """Trace one forward of a few samples, and free its memory."""
    run = _run_forward(job, settings, layout, ranks, samples=samples, length=length)
    gc.collect()  # the autograd graph has reference cycles, and its integer tensors need real memory
    trim_heap()
    return run


def _run_forward(
    job: Job, settings: Settings, layout: str, ranks: int, *, samples: int, length: int | None
) -> _TracedForward:
    """Trace one forward of the first rank. In one process at full length, also run an update to measure its state."""
    plan = make_profiling_plan(settings, layout, ranks, samples=samples)
    simulated_ranks = SimulatedRanks(mesh=plan.mesh)
    is_single = ranks == 1
    active_counters: list[FlopCounter] = []

    def observe(*operation: Any) -> None:
        if active_counters:
            active_counters[0].observe(*operation)

    with nullcontext() if is_single else fake_process_group(ranks), preserve_rng(), simulated_ranks.run_lock:
        fake_mode = FakeExecutionMode(fake_storages=simulated_ranks.fake_storages, on_operation=observe)
        with fake_mode:
            fake_mode.comparisons_are_true = False
            setup = build_training_setup(
                job=job, settings=settings, plan=plan, world=simulated_ranks.world(0, backend=plan.backend)
            )
            fake_mode.comparisons_are_true = True
            step_input = read_samples(job, settings, samples=samples)
            batch = step_input.micro[0].data
            batch = batch if length is None else shorten_batch(batch, sequence_length(job, settings), length)
            counter = FlopCounter(setup.model, blocks=named_blocks(setup.model))
            setup.model.train()
            replica = setup.step.replica
            for recorder in replica.state_recorders:
                recorder.begin_step()
            replica.reducer.begin()
            with counter.count_forward():
                active_counters.append(counter)
                terms = forward(replica, replica.slice_microbatch(batch), step=0, index=0, num_samples=samples)
                active_counters.clear()
            state_bytes = _state_bytes(setup, terms) if is_single and length is None else 0
            by_part = _parameters_by_part(setup.model)
            run = _TracedForward(
                costs=counter.costs,
                parameters={name: sum(p.numel() for p in group) for name, group in by_part.items()},
                tensors={name: tuple(p.numel() for p in group) for name, group in by_part.items()},
                frozen={name: sum(p.numel() for p in group if not p.requires_grad) for name, group in by_part.items()},
                lookups=_lookup_parameters(setup.model, by_part),
                buffer_bytes=sum(buffer.nbytes for buffer in setup.model.buffers()),
                state_bytes=state_bytes,
            )
            setup.close()
    return run


def _state_bytes(setup: TrainingSetup, terms: Any) -> int:
    """Run the backward and an update, and return the bytes of optimizer state. `terms` is the result of `forward`."""
    replica = setup.step.replica
    backward(replica, torch.stack([total for total, _ in terms.values()]).sum(), last=True)
    replica.reducer.finish(divisor=1.0)
    for optimizer in replica.update.optimizers:
        optimizer.step()
    return memory_at_rest(model=setup.model, optimizers=replica.update.optimizers).optimizer


def _parameters_by_part(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters by part. A tied parameter belongs to the first part that has it."""
    blocks = list(named_blocks(model))
    parameters: dict[str, list[nn.Parameter]] = {name: [] for name in (BEFORE_BLOCKS, *blocks, AFTER_BLOCKS)}
    has_seen_block = False
    for name, parameter in model.named_parameters():
        part = next((block for block in blocks if name.startswith(f"{block}.")), None)
        has_seen_block = has_seen_block or part is not None
        parameters[part or (AFTER_BLOCKS if has_seen_block else BEFORE_BLOCKS)].append(parameter)
    return parameters


def _lookup_parameters(model: nn.Module, by_part: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, int]:
    """Return the elements of the embedding tables by part.

    A table that is tied to another layer does not count, because that layer uses it in a matmul.
    """
    tables, others = set[int](), set[int]()
    for module in model.modules():
        target = tables if isinstance(module, nn.Embedding | nn.EmbeddingBag) else others
        target |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return {name: sum(p.numel() for p in group if id(p) in tables - others) for name, group in by_part.items()}


def _expert_parameters(job: Job, settings: Settings) -> dict[str, int]:
    """Return the elements of the experts by block, and the number of experts of one layer as `count`."""
    with FakeExecutionMode() as fake_mode, preserve_rng():
        fake_mode.comparisons_are_true = False
        model = job.model()
    try:
        experts = find_experts(model)
    except LayoutError:
        return {}
    sums = {"count": experts[0].num_experts}
    for expert in experts:
        part = next((block for block in named_blocks(model) if expert.name.startswith(f"{block}.")), BEFORE_BLOCKS)
        sums[part] = sums.get(part, 0) + sum(p.numel() for p in expert.module.parameters())
    return sums


def _layer_profile(
    name: str,
    few: _TracedForward,
    more: _TracedForward,
    shorter: Sequence[_TracedForward],
    tp_run: _TracedForward | None,
    length: int | None,
    experts: int,
    recompute: Mapping[str, RecomputeProfile],
    tp_parameters: Mapping[int, Mapping[str, int]],
) -> LayerProfile:
    """Return the profile of one part.

    `few`, `more` and `shorter` are traces of `FEW_SAMPLES`, `MORE_SAMPLES` and shorter sequences. `tp_run` is the trace
    with tp=2, if it works. `experts` is the number of elements of the part's experts.
    """

    def amount(field: str) -> BatchScaling:
        values = [getattr(run.costs[name], field) for run in (few, more, *shorter)]
        return fit_batch_scaling(values, length)

    counts, total = few.costs[name], few.parameters[name]
    saved, split = amount("saved_bytes"), 0
    fraction, tp_bytes, calls = 0.0, BatchScaling(), 0
    if tp_run is not None:
        split = min(total - experts, 2 * (total - tp_run.parameters[name]))
        tp_counts = tp_run.costs[name]
        fraction = min(1.0, max(0.0, 2 - 2 * tp_counts.saved_bytes / counts.saved_bytes)) if counts.saved_bytes else 0.0
        tp_bytes, calls = (
            fit_batch_scaling([tp_counts.reduced_bytes, tp_counts.reduced_bytes * MORE_SAMPLES / FEW_SAMPLES], length),
            tp_counts.reduced_calls,
        )
    largest = amount("largest_bytes")
    return LayerProfile(
        name={BEFORE_BLOCKS: "before", AFTER_BLOCKS: "after"}.get(name, name),
        whole_parameters=total - experts - split,
        split_parameters=split,
        expert_parameters=experts,
        frozen_parameters=few.frozen[name],
        lookup_parameters=few.lookups[name],
        buffer_bytes=few.buffer_bytes if name == BEFORE_BLOCKS else 0,
        matmul_flops=amount("matmul_flops"),
        attention_flops=amount("attention_flops"),
        masked_flops=amount("masked_flops"),
        moved_bytes=amount("moved_bytes"),
        fused_bytes=amount("fused_bytes"),
        saved_bytes=saved.scaled_by(1 - fraction),
        split_saved_bytes=saved.scaled_by(fraction),
        selective_saved_bytes=amount("matmul_result_bytes"),
        output_bytes=amount("output_bytes"),
        peak_bytes=replace(largest, fixed=0.0).scaled_by(2),
        tp_bytes=tp_bytes,
        tp_calls=calls,
        ep_bytes=amount("output_bytes").scaled_by(2) if experts else BatchScaling(),
        tensors=few.tensors[name],
        tp_parameters=tuple((size, parameters[name]) for size, parameters in tp_parameters.items()),
        ways=recompute,
    )
