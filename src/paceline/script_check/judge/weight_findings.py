"""Findings about weights and buffers: initialized, equal on all ranks, trained."""

from collections.abc import Iterator, Sequence

import numpy as np

from paceline.console.formatting import first_names, plural
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep
from paceline.script_check.recording import UNKNOWN_PARAMETER, TensorPrint

_LARGEST = 1e3  # of an initialized weight, as a root mean square
_SENDER = "DistributedDataParallel"  # which promises equal buffers
_EQUAL = 1e-4  # relative distance of weights that count as equal


def weight_findings(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield what is wrong with the weights before the first step and after each step, and with the buffers."""
    yield from _uninitialized(run)
    yield from _not_finite(run)
    yield from _unequal_weights(run)
    yield from _unequal_buffers(run)
    yield from _unchanged(run)
    yield from _batch_norms(run)


def _uninitialized(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a finding if weights are so large, or not numbers, that nobody can have initialized them."""
    wild = {
        name: each
        for step in run.start
        for weights in step.weights
        for name, each in weights.items()
        if not each.norm <= _LARGEST * max(each.numel, 1) ** 0.5
    }
    if wild:
        name, each = max(wild.items(), key=lambda item: item[1].largest if np.isfinite(item[1].largest) else np.inf)
        size = f"as large as {each.largest:.1e}" if np.isfinite(each.norm) else "not finite"
        yield ScriptFinding(
            name="not-initialized",
            text=f"before the first step, {plural(len(wild), 'parameter')}, as {name}, are {size}: never initialized",
            parameter=name,
            hint="after to_empty(), initialize every module: reset_parameters() of each one",
        )


def _not_finite(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a finding at the first step with a gradient that is not a number, or infinite."""
    for step in run.steps:
        for rank, gradients in enumerate(step.gradients):
            names = [name for name, each in gradients.items() if not np.isfinite(each.norm)]
            if names:
                yield ScriptFinding(
                    name="not-finite",
                    text=f"rank {rank} steps with gradients that are not finite: {len(names)} of"
                    f" {plural(len(gradients), 'parameter')}, as {first_names(names)}",
                    step=step.number,
                    parameter=names[0],
                    line=step.line("backward"),
                    hint="look at the data and the loss of this step; a smaller learning rate, clipping, or a loss"
                    " scale that skips such steps",
                )
                return


def _unequal_weights(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a finding at the first step at which ranks have different weights."""
    for step in [*run.start, *run.steps]:
        names = _unequal_names(step)
        if not names:
            continue
        of_all = f"{plural(len(step.weights[0]), 'parameter')}{_of_optimizer(run, step)}"
        when = "before the first step" if not step.number else "after the step"
        yield ScriptFinding(
            name="weights-differ",
            text=f"{when}, {len(names)} of {of_all} differ between the ranks, as {first_names(names)}",
            step=step.number,
            parameter=names[0],
            line=step.line("step") if step.number else "",
            is_note=not step.number and all(name.startswith(UNKNOWN_PARAMETER) for name in names),
            hint="right where each rank has a part of all weights, as in ZeRO"
            if not step.number and all(name.startswith(UNKNOWN_PARAMETER) for name in names)
            else "start all ranks from the same weights: seed all ranks alike before the model is made, or wrap it in"
            " DistributedDataParallel, which sends those of rank 0"
            if not step.number
            else "the ranks step with different gradients, or with different settings of the optimizer",
        )
        return


def averaged_steps(run: ScriptRun) -> list[int]:
    """Return the steps after which all ranks got the same weights, and those of no single rank, as by an average."""
    by_number = {(step.optimizer, step.number): step for step in run.steps}
    found = []
    for step in run.steps:
        after = by_number.get((step.optimizer, step.number + 1))
        for name, digest in (after.ranks[0].digests_before if after is not None else {}).items():
            own = {weights[name].digest for weights in step.weights if name in weights}
            is_equal = after is not None and all(rank.digests_before.get(name) == digest for rank in after.ranks)
            if is_equal and len(own) > 1 and digest not in own:
                found.append(step.number)
                break
    return found


def _of_optimizer(run: ScriptRun, step: ScriptStep) -> str:
    name = run.optimizer_name(step)
    return f" of {name}" if name else ""


def _unequal_names(step: ScriptStep) -> list[str]:
    first = step.weights[0]
    return [
        name
        for name, each in first.items()
        if any(name in other and relative_distance(each, other[name]) > _EQUAL for other in step.weights[1:])
    ]


def relative_distance(one: TensorPrint, other: TensorPrint) -> float:
    """Return an estimate of the relative distance of two tensors from their projections."""
    if one.digest == other.digest:
        return 0.0
    norm = max(one.norm, other.norm)
    difference = float(np.sqrt(np.mean(np.subtract(one.projections, other.projections) ** 2)))
    if not np.isfinite(difference) or not np.isfinite(norm):
        return float("inf")
    return difference / norm if norm else 0.0


def _unequal_buffers(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a finding about buffers that differ under DistributedDataParallel, which sends them; else a note."""
    if run.sharding == "tensor":
        return
    for step in run.steps:
        names = [
            name
            for name, digest in step.ranks[0].buffers.items()
            if any(rank.buffers.get(name, digest) != digest for rank in step.ranks[1:])
        ]
        if names:
            is_sent = _SENDER in {name for each in run.steps for name in each.ranks[0].wrappers}
            nobody = ": nothing sends them, so evaluations and checkpoints of the ranks differ"
            yield ScriptFinding(
                name="buffers-differ",
                text=f"when the forward begins, buffers differ between the ranks, as {first_names(names)}"
                f"{'' if is_sent else nobody}",
                step=step.number,
                parameter=names[0],
                line=step.line("forward"),
                hint="broadcast_buffers=True, SyncBatchNorm, or evaluate with the buffers of one rank on all ranks"
                if is_sent
                else "SyncBatchNorm; or send the buffers of rank 0 to all ranks before an evaluation",
                is_note=not is_sent,
            )
            return


def _unchanged(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a finding about parameters that have a gradient, and are the same after all steps."""
    for start in run.start:
        steps = [step for step in run.steps if step.optimizer == start.optimizer and step.has_prints]
        if len(steps) < 2 or not any(_learning_rate(step) for step in steps):
            continue
        names = [name for name, each in start.weights[0].items() if _is_unchanged(name, each, steps)]
        if names:
            yield ScriptFinding(
                name="not-trained",
                text=f"{len(names)} of {plural(len(start.weights[0]), 'parameter')}{_of_optimizer(run, steps[0])}, as"
                f" {first_names(names)}, with a"
                f" gradient at every step, keep their values for {plural(len(steps), 'step')}",
                step=steps[-1].number,
                parameter=names[0],
                line=steps[-1].line("step"),
                hint="a learning rate of 0 for their group, weights copied after the optimizer was made, or an update"
                " too small for their type: keep float32 weights",
            )


def _is_unchanged(name: str, start: TensorPrint, steps: Sequence[ScriptStep]) -> bool:
    has_gradients = all(
        name in step.judged_names and step.gradients[0][name].norm > 0 for step in steps
    )  # one that is not judged may be only rounding
    return has_gradients and all(
        step.weights[0][name].digest == start.digest for step in steps if name in step.weights[0]
    )


def _learning_rate(step: ScriptStep) -> float:
    return max((float(group.get("lr", 1.0)) for group in step.ranks[0].groups), default=0.0)


def _batch_norms(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a note that batch norms see only the batch of their rank."""
    names = sorted({name for step in run.steps for rank in step.ranks for name in rank.batch_norms})
    if names and run.world_size > 1:
        yield ScriptFinding(
            name="batch-norm",
            text=f"{plural(len(names), 'batch norm')}, as {first_names(names)}: each rank normalizes by the samples of"
            " its own batch alone, so another number of ranks is another training",
            hint="torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
            is_note=True,
        )


def parameters_without_gradient(run: ScriptRun) -> list[str]:
    """Return the parameters of the optimizers that never had a gradient."""
    all_names = {name for step in run.start for name in step.weights[0]}
    with_gradient = {name for step in run.steps for gradients in step.gradients for name in gradients}
    return sorted(all_names - with_gradient)
