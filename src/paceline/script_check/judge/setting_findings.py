"""Findings about settings: different ones on different ranks, schedulers that step more often than the optimizer."""

from collections.abc import Iterator
from itertools import pairwise

from paceline.console.formatting import plural
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun
from paceline.script_check.judge.weight_findings import parameters_without_gradient
from paceline.script_check.recording import UNKNOWN_PARAMETER


def setting_findings(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield what is wrong with the settings of the optimizers."""
    yield from _optimizers_without_gradients(run)
    yield from _replaced_parameters(run)
    yield from _unequal_options(run)
    yield from _fast_schedulers(run)
    counts = {len(recording.steps) for recording in run.ranks}
    if len(counts) > 1 and not all(recording.fault for recording in run.ranks):
        numbers = ", ".join(str(len(recording.steps) - len(run.start)) for recording in run.ranks)
        yield ScriptFinding(
            name="unequal-steps",
            text=f"the ranks made different numbers of optimizer steps: {numbers}",
            step=run.last_step,
            hint="give all ranks as many batches: drop_last=True; right inside join()",
            is_note=True,
        )


def _optimizers_without_gradients(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a finding about an optimizer that steps although none of its parameters ever has a gradient."""
    for start in run.start:
        steps = [step for step in run.steps if step.optimizer == start.optimizer]
        if steps and not any(gradients for step in steps for gradients in step.gradients):
            count = plural(len(start.weights[0]), "parameter")
            who = run.optimizer_name(start) or start.ranks[0].optimizer_class
            yield ScriptFinding(
                name="optimizer-without-gradients",
                text=f"{who} steps, but none of its {count} ever has a gradient: the model that is trained has other"
                " parameters",
                step=steps[0].number,
                line=steps[0].line("step"),
                hint="make the optimizer after the model has been copied, moved, wrapped and sharded",
            )


def _replaced_parameters(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a note about parameters of an optimizer that are in no model and never have a gradient, if others have."""
    unused = {name for name in parameters_without_gradient(run) if name.startswith(UNKNOWN_PARAMETER)}
    for start in run.start:
        names = sorted(unused & set(start.weights[0]))
        steps = [step for step in run.steps if step.optimizer == start.optimizer]
        if names and steps and len(names) < len(start.weights[0]):
            yield ScriptFinding(
                name="replaced-parameters",
                text=f"{len(names)} of {plural(len(start.weights[0]), 'parameter')} of"
                f" {run.optimizer_name(start) or start.ranks[0].optimizer_class} are in no model, and never have a"
                " gradient: a part of the model was replaced after the optimizer was made",
                step=steps[0].number,
                line=steps[0].line("step"),
                hint="make the optimizer after the model is complete",
                is_note=True,
            )


def _unequal_options(run: ScriptRun) -> Iterator[ScriptFinding]:
    for step in run.steps:
        for rank in step.ranks[1:]:
            for number, (one, other) in enumerate(zip(step.ranks[0].groups, rank.groups, strict=False)):
                names = [name for name in one if name in other and one[name] != other[name]]
                if names:
                    name = names[0]
                    group = f"parameter group {number}"
                    of = run.optimizer_name(step)
                    yield ScriptFinding(
                        name="settings-differ",
                        text=f"{name} of {f'{group} of {of}' if of else group} is {one[name]} on rank 0, and"
                        f" {other[name]} on another rank",
                        step=step.number,
                        line=step.line("step"),
                        hint="make the optimizer and its scheduler alike on all ranks",
                    )
                    return


def _fast_schedulers(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a note if a scheduler is as many steps further after each step as there are ranks."""
    steps = [step for step in run.steps if step.optimizer == 0 and step.ranks[0].scheduler_steps]
    if run.world_size < 2 or len(steps) < 3:
        return
    values = [step.ranks[0].scheduler_steps[0] for step in steps]
    advances = {after - before for before, after in pairwise(values)}
    if advances == {run.world_size}:
        yield ScriptFinding(
            name="scheduler-steps",
            text=f"the learning rate scheduler advances {run.world_size} steps at each optimizer step, one for each"
            f" rank: it comes to its end after 1/{run.world_size} of the steps that it was written for",
            step=steps[1].number,
            line=steps[1].line("step"),
            hint="right if its number of steps was counted for one process, as Accelerate expects; else multiply it by"
            " the number of ranks, or call scheduler.step() once for each step",
            is_note=True,
        )
