"""Findings about the reduction of gradients: reduced at all, how, at which backward pass, and for which parameters."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import log2

from paceline.console.formatting import plural
from paceline.script_check.judge.reduction import LOST, Reduction, StepReduction, find_reductions
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep

_FACTOR_KINDS = ("mean", "scaled", "alike")  # with one factor for all parameters
_MIN_CLIP = 1e-4  # a smaller factor is hardly one of clipping
_WRAP = "wrap the model: DistributedDataParallel(model); right only if weights are averaged later, as in local SGD"
_CALL = (
    "call the wrapper, not model.module; no no_sync() around the last backward pass of a step; a process group with all"
    " ranks; right only if weights are averaged later, as in local SGD"
)
_CLIP_ROUNDING = 0.01  # relative, of a factor that clipping may give
_HINTS = {
    "scaled-otherwise": "clip on all ranks alike, by a norm that all of them know",
    "sum": "divide by the number of ranks; right only if each rank divides its loss by the count of all ranks",
    "mean-twice": "divide the gradients or the loss by the number of ranks only once",
    "unequal": "clip after the reduction; or, if ranks have unequal counts, weight each loss by count / mean count",
    "stale": "optimizer.zero_grad() once in each step",
    "zero": "look at the loss: is it constant, as a cross entropy over one class, or detached from the model?",
}
_TEXTS = {
    "own": "{who} with its own gradient alone: the ranks train apart",
    "scaled-otherwise": "the gradients of the ranks are multiplied by different factors {weights} after the reduction",
    "sum": "the optimizer steps with the sum of the ranks' gradients, not with their mean",
    "mean-twice": "the optimizer steps with the mean of the ranks' gradients divided by {world} once more",
    "unequal": "the ranks' gradients count with unequal weights {weights}: clipped before the reduction, or weighted by"
    " counts",
    "stale": "the gradient of the step before is still in the gradient: it was not set to zero",
    "zero": "every gradient is zero: nothing is trained",
}


def all_reductions(run: ScriptRun) -> list[StepReduction]:
    """Return the reductions of all steps, each rank's one after another."""
    found: list[StepReduction] = []
    for number in sorted({step.optimizer for step in run.steps}):
        steps = [step for step in run.steps if step.optimizer == number and step.has_prints]
        stale: set[int] = set()  # ranks
        for before, step in pairwise([None, *steps]):
            assert step is not None
            is_next = before is not None and before.number == step.number - 1
            for each in find_reductions(step, before=before if is_next else None):
                if each.total.kind == "stale":
                    stale.add(each.rank)
                is_still_stale = each.rank in stale and not is_next and each.total.kind == "unexplained"
                found.append(replace(each, total=replace(each.total, kind="stale")) if is_still_stale else each)
    return found


def reduction_findings(run: ScriptRun, reductions: Sequence[StepReduction]) -> Iterator[ScriptFinding]:
    """Yield the first finding of each kind, and notes about clipping and loss scales."""
    named: set[str] = set()
    all_zero = bool(reductions) and all(each.total.kind == "zero" for each in reductions)
    own_steps = Counter(id(each.step) for each in reductions if each.total.kind == "own")
    is_by_parameter = any(each.total.kind == "by-parameter" for each in reductions)
    for each in _with_unequal_factors(reductions):
        finding = _finding(
            each, world_size=run.world_size, all_zero=all_zero, is_everywhere=own_steps[id(each.step)] == run.world_size
        )
        if is_by_parameter and {odd.kind for odd in each.odd_parameters.values()} <= {"sum", "mean-twice"}:
            finding = None if each.odd_parameters else finding  # a factor that is the number of ranks by chance
        if finding is not None and finding.name not in named:
            named.add(finding.name)
            of = run.optimizer_name(each.step)
            yield replace(finding, text=f"{of}: {finding.text}") if of else finding
    elsewhere = {id(each.step) for each in reductions if each.total.kind == "unexplained"}
    yield from () if elsewhere else _discarded(run)  # gradients may be added up in other tensors
    yield from _clipped_while_scaled(reductions)


def _with_unequal_factors(reductions: Sequence[StepReduction]) -> Iterator[StepReduction]:
    """Yield the reductions; a rank whose factors differ from those of rank 0 at the same step is `scaled-otherwise`."""
    first: dict[int, dict[str, float]] = {}
    for each in reductions:
        factors_of_rank = _factors(each)
        expected = first.setdefault(id(each.step), factors_of_rank) if factors_of_rank else {}
        pairs = [(expected[name], value) for name, value in factors_of_rank.items() if name in expected]
        unequal = [pair for pair in pairs if abs(pair[1] - pair[0]) > 0.01 * pair[0]]
        if unequal:
            weights = (unequal[0],)
            yield replace(each, total=replace(each.total, kind="scaled-otherwise", weights=weights))
        else:
            yield each


def _factors(reduction: StepReduction) -> dict[str, float]:
    """Return the factors of the mean by parameter; nothing if a gradient is no multiple of the mean."""
    total = reduction.total
    if total.kind == "by-parameter":
        return {name: each.factor for name, each in reduction.parameters.items()}
    return dict.fromkeys(reduction.step.judged_names, total.factor) if total.kind in _FACTOR_KINDS else {}


def have_equal_factors(reductions: Sequence[StepReduction]) -> bool:
    """Return whether the gradients of all ranks are multiplied by the same factor at each step."""
    return all(each.total.kind != "scaled-otherwise" for each in _with_unequal_factors(reductions))


def factors(reductions: Sequence[StepReduction]) -> list[float]:
    """Return the factors other than 1 by which gradients are multiplied before the step."""
    return [each.total.factor for each in reductions if each.total.kind == "scaled"]


def factors_by_parameter(reductions: Sequence[StepReduction]) -> list[float]:
    """Return the factors of all parameters at the steps at which each parameter is multiplied by another one."""
    return [value for each in reductions if each.total.kind == "by-parameter" for value in _factors(each).values()]


def are_powers_of_two(values: Sequence[float]) -> bool:
    """Return whether all factors are powers of two, as loss scales are."""
    return all(value > 0 and abs(log2(value) - round(log2(value))) < 1e-3 for value in values)


def _finding(reduction: StepReduction, *, world_size: int, all_zero: bool, is_everywhere: bool) -> ScriptFinding | None:
    step, total = reduction.step, reduction.total
    if total.kind in ("mean", "scaled", "alike") or (total.kind == "zero" and not all_zero):
        return None
    if total.kind == "by-parameter":
        return _enlarged(reduction)
    if world_size == 1 and total.kind not in ("stale", "zero"):
        return None
    if total.kind in ("passes", "clipped-passes"):
        return _lost_passes(reduction)
    if total.kind == "unexplained":
        return _odd_parameter(reduction)
    weights = ", ".join(f"{value:.3g}" for value in total.weights[0]) if total.weights else ""
    who = "each rank steps" if is_everywhere else f"rank {reduction.rank} steps"
    text = _TEXTS[total.kind].format(who=who, world=world_size, weights=f"({weights})")
    is_wrapped = total.kind == "own" and any(step.ranks[0].wrappers)
    return ScriptFinding(
        name=f"gradients-{total.kind}",
        text=text,
        step=step.number,
        line=step.line("backward" if total.kind != "stale" else "step"),
        hint=_CALL if is_wrapped else _WRAP if total.kind == "own" else _HINTS[total.kind],
    )


def _lost_passes(reduction: StepReduction) -> ScriptFinding | None:
    """Return a finding about backward passes whose gradients do not arrive from the other ranks."""
    table, rank = reduction.total.weights, reduction.rank
    others = [row for number, row in enumerate(table) if number != rank]
    count = len(table[0])
    own = [abs(value) for value in table[rank]]
    lost = [
        place + 1 for place in range(count) if others and all(abs(row[place]) < LOST * own[place] for row in others)
    ]
    step = reduction.step
    if lost and len(lost) < count:
        which = ", ".join(map(str, lost))
        return ScriptFinding(
            name="backward-not-reduced",
            text=f"of {count} backward passes, those of the other ranks numbered {which} never arrive at rank {rank}",
            step=step.number,
            line=step.line("backward"),
            hint="no_sync() around all backward passes of a step but the last one",
        )
    shown = "; ".join(
        f"rank {number}: {', '.join(f'{value:.3g}' for value in row)}" for number, row in enumerate(table)
    )
    is_clipped = reduction.total.kind == "clipped-passes"
    text = f"the backward passes of a step count with unequal weights ({shown})"
    return ScriptFinding(
        name="passes-unequal",
        text=f"{text}: the gradients are clipped between the passes" if is_clipped else text,
        step=step.number,
        line=step.line("backward"),
        hint="clip once in each step, after its last backward pass"
        if is_clipped
        else "divide the loss of each pass by the number of passes, and reduce after the last one",
    )


def _enlarged(reduction: StepReduction) -> ScriptFinding | None:
    """Return a note if parameters have another factor each, and one of them is larger than 1, so that it is no clip."""
    values = {name: each.factor for name, each in reduction.parameters.items()}
    name = max(values, key=lambda each: values[each])
    if values[name] <= 1 + _CLIP_ROUNDING:
        return None
    return ScriptFinding(
        name="factors-by-parameter",
        text=f"the mean of the ranks' gradients is multiplied by another factor for each parameter, {values[name]:.3g}"
        f" for {name}",
        step=reduction.step.number,
        parameter=name,
        line=reduction.step.line("step"),
        hint="right where gradients are normalized for each parameter, or some are enlarged on purpose",
        is_note=True,
    )


def _odd_parameter(reduction: StepReduction) -> ScriptFinding | None:
    """Return a finding about the parameters that are reduced otherwise than the others."""
    odd, usual = reduction.odd_parameters, reduction.usual_kind
    if usual == "unexplained" or not odd:
        return _clipped_by_value(reduction)
    name, first = next(iter(sorted(odd.items(), key=lambda item: item[1].kind != "own")))
    others = _in_words(next(each for each in reduction.parameters.values() if each.kind == usual))
    count = f"{len(odd)} of {plural(len(reduction.parameters), 'parameter')}"
    text = f"{name} {_describe(first)} ({count}; the others: {others})"
    if first.kind == "unexplained" and all(each.kind == "unexplained" for each in odd.values()):
        return _unexplained(reduction, text, parameter=name)
    return ScriptFinding(
        name="parameter-reduced-otherwise",
        text=text,
        step=reduction.step.number,
        parameter=name,
        line=reduction.step.line("backward"),
        hint="the parameter must be in the wrapped model when it is wrapped, and not ignored by it",
    )


_REDUCTIONS = {
    "mean": "the mean of all ranks",
    "scaled": "the mean, multiplied by {factor:.3g}",
    "sum": "the sum of all ranks",
    "mean-twice": "the mean, divided by the ranks once more",
    "own": "each rank's own one",
    "unequal": "a sum in which the ranks count unequally",
    "alike": "equal on all ranks before the reduction",
    "zero": "zero",
}
"""Words for the gradient with which a parameter steps."""


def _describe(reduction: Reduction) -> str:
    if reduction.kind == "own":
        return "is not reduced: each rank steps with its own gradient"
    if reduction.kind == "unexplained":
        return f"has a gradient that no weighting of the ranks' gradients explains (rest {reduction.residual:.1%})"
    return f"has another gradient than the other parameters: {_in_words(reduction)}"


def _in_words(reduction: Reduction) -> str:
    return _REDUCTIONS.get(reduction.kind, reduction.kind).format(factor=reduction.factor)


def _clipped_by_value(reduction: StepReduction) -> ScriptFinding:
    """Return a note if all gradients end at the same value, and that the reduction can't be judged otherwise."""
    step, rank = reduction.step, reduction.rank
    largest = {step.gradients[rank][name].largest for name in reduction.parameters}
    if largest and max(largest) - min(largest) <= 1e-6 * max(largest):
        text = f"gradients are clipped by value, at {max(largest):.3g}; how they are reduced can't be seen then"
        return ScriptFinding(name="clipped-by-value", text=text, step=step.number, line=step.line("step"), is_note=True)
    text = "the gradients change between the backward and the step in a way that is no weighting of the ranks'"
    return _unexplained(reduction, text)


def _unexplained(reduction: StepReduction, text: str, *, parameter: str = "") -> ScriptFinding:
    """Return a note: a fault in the reduction also gives the ranks different weights, which is a finding."""
    return ScriptFinding(
        name="reduction-unexplained",
        text=text,
        step=reduction.step.number,
        parameter=parameter,
        line=reduction.step.line("step"),
        hint="compressed or quantized gradients do that, and so does a hook on a parameter",
        is_note=True,
    )


def _clipped_while_scaled(reductions: Sequence[StepReduction]) -> Iterator[ScriptFinding]:
    """Yield a note if gradients become so small before a step that they were probably clipped while scaled."""
    values = factors(reductions)
    if values and max(values) < _MIN_CLIP and not are_powers_of_two(values):
        first = next(each for each in reductions if each.total.kind == "scaled")
        yield ScriptFinding(
            name="clipped-while-scaled",
            text=f"gradients are multiplied by {first.total.factor:.1e} before the step: with a loss scale, they were"
            " probably clipped while they were scaled",
            step=first.step.number,
            line=first.step.line("step"),
            hint="scaler.unscale_(optimizer) before the clipping; right if the loss is as large as that",
            is_note=True,
        )


def _discarded(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a finding if gradients of a step are set to zero between its backward passes, at every step.

    If the same samples go through the model several times, or samples that need a gradient, this may be meant: a
    closure, sharpness-aware minimization, adversarial training.
    """
    steps = [step for step in run.steps if step.optimizer == 0 and step.has_prints]
    if len({step.optimizer for step in run.steps}) > 1 or not steps:
        return  # with several optimizers, each throws away what the loss of another one gave
    counts = [max(rank.num_discarded for rank in step.ranks) for step in steps]
    if all(counts) and all(_has_new_samples(step) for step in steps):
        yield ScriptFinding(
            name="gradients-discarded",
            text=f"zero_grad() throws away the gradients of {plural(counts[0], 'backward pass')} in"
            " each step: it is called within the accumulation",
            step=steps[0].number,
            line=_first_line(steps),
            hint="call optimizer.zero_grad() once, after optimizer.step()",
        )


def _has_new_samples(step: ScriptStep) -> bool:
    """Return whether each forward pass of the step had samples, and no other one of the rank had the same ones."""
    for rank in step.ranks:
        calls = [call for call in rank.calls if call.has_parameters]
        keys = [key for call in calls for key in set(call.samples)]
        if not all(call.samples for call in calls) or len(set(keys)) < len(keys):
            return False
    return True


def _first_line(steps: Sequence[ScriptStep]) -> str:
    return next((step.line("backward") for step in steps if step.line("backward")), "")
