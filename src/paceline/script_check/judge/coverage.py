"""Statements about what a recorded run did not exercise, so that a clean verdict says nothing about it."""

from collections.abc import Sequence

from paceline.console.formatting import first_names, plural
from paceline.script_check.judge.data_findings import has_repeated_samples, has_unequal_counts
from paceline.script_check.judge.loader_findings import loader_steps
from paceline.script_check.judge.reduction import StepReduction
from paceline.script_check.judge.reduction_findings import are_powers_of_two, factors, factors_by_parameter
from paceline.script_check.judge.script_run import ScriptRun
from paceline.script_check.judge.weight_findings import parameters_without_gradient


def not_exercised(run: ScriptRun, reductions: Sequence[StepReduction]) -> list[str]:
    """Return a sentence about each thing that the run did not exercise."""
    lines = []
    steps, several = run.steps, run.world_size > 1
    num_light = sum(not step.has_prints for step in steps)
    if num_light:
        lines.append(f"gradients and weights at {num_light} of {plural(len(steps), 'step')}: --every leaves them out")
    if not several:
        lines.append("one rank: nothing was reduced, and no rank can differ")
    if several and not reductions:
        lines.append("the reduction: no own gradient of a rank was seen")
    if reductions and all(each.total.kind == "alike" for each in reductions):
        lines.append("the reduction: all ranks computed the same gradients, so a mean of them changes nothing")
    if not any(len(passes) > 1 for step in steps for rank in step.ranks for passes in rank.own_gradients.values()):
        lines.append("accumulation: each step had one backward pass")
    if not any(call.random_state for step in steps for rank in step.ranks for call in rank.calls):
        lines.append("random numbers in the forward: dropout is 0 or absent")
    if several and not has_unequal_counts(run):
        lines.append("unequal batches: all ranks had as many samples at every step")
    if not has_repeated_samples(run):
        lines.append(_second_epoch(run))
    lines += _few_batches_of_workers(run)
    made_before = max((rank.made_before for step in run.start for rank in step.ranks), default=0)
    if made_before:
        lines.append(
            f"the resume: the optimizer had made {plural(made_before, 'step')} before, and one run does not show"
            " whether the samples go on where they ended; compare it with a recording of the run before"
        )
    unreadable = sorted({text for step in steps for rank in step.ranks for text in rank.unreadable})
    if unreadable:
        lines.append(f"tensors that can't be read: {first_names(unreadable)}")
    scales = [*factors(reductions), *factors_by_parameter(reductions)]
    is_always_scaled = all(each.total.kind in ("scaled", "by-parameter") for each in reductions)
    if scales and is_always_scaled and not are_powers_of_two(scales):
        lines.append("a constant factor of the gradients: each step multiplies them, as clipping does, which hides it")
    if len({str([group.get("lr") for group in step.ranks[0].groups]) for step in steps}) == 1:
        lines.append("the schedule of the learning rate: it was constant")
    unused = parameters_without_gradient(run)
    if unused:
        lines.append(f"{plural(len(unused), 'parameter')} without a gradient: {first_names(unused)}")
    if not any(step.samples(rank) for step in steps for rank in range(run.world_size)):
        lines.append("the samples: the inputs of the model are no tensors with a batch dimension")
    unseen = sorted({name for step in steps for name in step.gradients[0] if name not in step.ranks[0].own_gradients})
    if unseen and reductions:
        lines.append(
            f"the reduction of {first_names(unseen)}: no own gradient was seen, as of parameters outside the model"
        )
    return lines


def _second_epoch(run: ScriptRun) -> str:
    """Return a sentence about the second epoch, and about a sampler whose epoch was not set before the first one."""
    text = "a second epoch: no sample came again"
    uses = [each.use for each in loader_steps(run.steps, 0)]
    if not any(use.is_epoch_forgotten for use in uses):
        return text
    return (
        f"{text}; without a call of the sampler's set_epoch(), of which there was none, it has the order of the first"
    )


def _few_batches_of_workers(run: ScriptRun) -> list[str]:
    """Return a sentence if the workers of a data loader are too many to be compared with each other."""
    uses = [each.use for each in loader_steps(run.steps, 0)]
    count = max((use.num_workers for use in uses), default=0)
    num_batches = sum(use.batches for use in uses)
    if count < 2 or num_batches >= 2 * count:
        return []
    return [f"the workers of the data loader: {count} of them gave {plural(num_batches, 'batch')} in all"]
