"""Statements about what a recorded run did not exercise, so that a clean verdict says nothing about it."""

from collections.abc import Sequence

from paceline.console.formatting import first_names, plural
from paceline.script_check.judge.data_findings import has_repeated_samples, has_unequal_counts
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
        lines.append("the end of an epoch: no sample came again")
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
