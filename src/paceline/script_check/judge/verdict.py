"""The verdict on a recorded run: the findings with the causes first, what is sound, and what was not exercised."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from paceline.console.formatting import first_names, plural
from paceline.errors import ExitCode
from paceline.script_check.judge.coverage import not_exercised
from paceline.script_check.judge.data_findings import data_findings
from paceline.script_check.judge.finding_causes import with_known_causes
from paceline.script_check.judge.forward_findings import forward_findings
from paceline.script_check.judge.loader_findings import loader_findings
from paceline.script_check.judge.model_split import ModelSplit, find_split
from paceline.script_check.judge.reduction import StepReduction
from paceline.script_check.judge.reduction_findings import (
    all_reductions,
    are_powers_of_two,
    factors,
    factors_by_parameter,
    have_equal_factors,
    reduction_findings,
)
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun
from paceline.script_check.judge.setting_findings import setting_findings
from paceline.script_check.judge.split_findings import (
    NO_PIECES,
    NOT_CLEAR,
    NOT_EXERCISED,
    has_parted,
    split_findings,
)
from paceline.script_check.judge.weight_findings import averaged_steps, weight_findings

_CONSEQUENCES = ("weights-differ", "buffers-differ")
"""Findings that follow from a wrong reduction, and are then left out."""
_FOLLOWERS = {
    "optimizer-without-gradients": ("weights-differ", "same-samples"),
    "not-initialized": ("not-finite", "gradients-zero"),
    "not-finite": ("reduction-unexplained",),
    "peers-read-otherwise": (
        "gradients-own",
        "weights-differ",
        "common-samples",
        "parameter-reduced-otherwise",
        "reduction-unexplained",
        "gradients-unequal",
        "gradients-scaled-otherwise",
    ),
}
"""Findings that say nothing beside another one: the weights of an optimizer that trains nothing, and the like."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict; its fields are the keys of `--json`. `exit_code` is 0, 4 (a finding), or 5 (can't be judged)."""

    exit_code: int
    ranks: int
    steps: int
    findings: list[ScriptFinding]
    sound: list[str]
    not_exercised: list[str]
    reason: str = ""
    """Why the run can't be judged."""


def judge(run: ScriptRun) -> Verdict:
    """Return the verdict on a run that has at least one step on all ranks."""
    split = find_split(run)
    if split is not None:
        return _judge_split(run, split)
    reductions = all_reductions(run)
    found = list(
        chain(
            data_findings(run, reductions),
            reduction_findings(run, reductions),
            forward_findings(run),
            weight_findings(run),
            setting_findings(run),
        )
    )
    found = _with_averages(found, averaged_steps(run))
    findings = _without_consequences(with_known_causes(found, run))
    faults = [finding for finding in findings if not finding.is_note]
    reason = "" if faults else _reason(run, reductions)
    code = ExitCode.DIFFERENT if faults else ExitCode.NOT_JUDGED if reason else ExitCode.DONE
    return Verdict(
        exit_code=int(code),
        ranks=run.world_size,
        steps=run.last_step,
        findings=sorted(findings, key=lambda finding: (finding.is_note, finding.step)),
        sound=_sound(run, reductions, {finding.name for finding in found}),
        not_exercised=not_exercised(run, reductions),
        reason=reason,
    )


def _judge_split(run: ScriptRun, split: ModelSplit) -> Verdict:
    """Return the verdict on a model that the script splits over the ranks: only replicas are reduced and alike."""
    found = list(
        chain(
            split_findings(run, split),
            loader_findings(run, run.steps),
            (each for each in weight_findings(run) if each.name not in _CONSEQUENCES),
            setting_findings(run),
        )
    )
    findings = _without_consequences(found)
    faults = [finding for finding in findings if not finding.is_note]
    has_replicas = any(len(ranks) > 1 for groups in split.replicas.values() for ranks in groups)
    reason = ""
    if not faults:
        faulty = next((recording.fault for recording in run.ranks if recording.fault), "")
        reason = f"the recorder failed: {faulty}" if faulty else ""
        reason = reason or (NO_PIECES if split.by_gradients else "" if split.is_clear else NOT_CLEAR)
    is_told = split.is_clear and not split.by_gradients
    sound = [split.description] if is_told else []
    if is_told and has_replicas and not has_parted(run, split):
        sound.append("the replicas of each parameter stay equal")
    code = ExitCode.DIFFERENT if faults else ExitCode.NOT_JUDGED if reason else ExitCode.DONE
    return Verdict(
        exit_code=int(code),
        ranks=run.world_size,
        steps=run.last_step,
        findings=sorted(findings, key=lambda finding: (finding.is_note, finding.step)),
        sound=sound,
        not_exercised=[NOT_EXERCISED] if is_told else [],
        reason=reason,
    )


def _with_averages(findings: Sequence[ScriptFinding], averaged: Sequence[int]) -> list[ScriptFinding]:
    """Return the findings; if weights are averaged after some steps, own gradients are a note, as in local SGD."""
    if not averaged or all(finding.name != "gradients-own" for finding in findings):
        return list(findings)
    steps = first_names([str(step) for step in averaged])
    when = f"until their weights are averaged, after step {steps}, as in local SGD"
    return [
        replace(finding, is_note=True, text=f"{finding.text} {when}") if finding.name == "gradients-own" else finding
        for finding in findings
        if finding.name != "weights-differ" or not finding.step
    ]


def _without_consequences(findings: Sequence[ScriptFinding]) -> list[ScriptFinding]:
    """Leave out what follows from an earlier wrong reduction."""
    causes = [
        finding.step
        for finding in findings
        if not finding.is_note
        and finding.name.startswith(("gradients-", "backward-", "parameter-", "passes-", "settings-"))
    ]
    first = min(causes, default=None)
    names = {finding.name for finding in findings if not finding.is_note}
    left_out = {follower for cause, followers in _FOLLOWERS.items() if cause in names for follower in followers}
    has_same_samples = any(finding.name == "same-samples" and not finding.is_note for finding in findings)
    return [
        finding
        for finding in findings
        if finding.name not in left_out
        and not (finding.name in _CONSEQUENCES and first is not None and finding.step >= first)
        and not (finding.name == "same-random-numbers" and has_same_samples)
    ]


def _reason(run: ScriptRun, reductions: Sequence[StepReduction]) -> str:
    """Return why nothing can be said, or ""."""
    faults = [recording.fault for recording in run.ranks if recording.fault]
    if faults:
        return f"the recorder failed: {faults[0]}"
    if run.world_size > 1 and not reductions:
        return (
            "no own gradient of a rank was seen: ZeRO 3, a compiled model of FSDP, or parameters of the optimizer that"
            " are no parameters of a model"
        )
    if run.world_size > 1 and all(each.total.kind == "unexplained" for each in reductions):
        return "no weighting of the ranks' own gradients explains the gradients of the steps"
    return ""


def _sound(run: ScriptRun, reductions: Sequence[StepReduction], found: set[str]) -> list[str]:
    """Return a sentence about each thing that was judged, and is right."""
    lines = []
    kinds = {each.total.kind for each in reductions}
    is_alike = have_equal_factors(reductions)
    if run.world_size > 1 and kinds and kinds <= {"mean", "scaled", "by-parameter"} and is_alike:
        names = dict[int, int]()
        for each in reductions:
            optimizer = each.step.optimizer
            names[optimizer] = max(names.get(optimizer, 0), len(each.step.judged_names))
        of_all = plural(sum(names.values()), "parameter")
        lines.append(f"each rank steps with the mean of all ranks' gradients ({of_all})")
    clips = factors_by_parameter(reductions)
    if clips and is_alike and "factors-by-parameter" not in found:
        lines.append(
            f"gradients are clipped per parameter or group, by {min(clips):.3g} to {max(clips):.3g}, alike on all ranks"
        )
    scales = factors(reductions)
    if scales and is_alike:
        many = " to ".join(dict.fromkeys(f"{value:.3g}" for value in (min(scales), max(scales))))
        why = "a loss scale, or accumulation" if are_powers_of_two(scales) else "clipping"
        if "clipped-while-scaled" not in found:
            lines.append(f"gradients are multiplied by {many} before the step, alike on all ranks: {why}")
    if run.world_size > 1 and not {"weights-differ", "gradients-own"} & found:
        which = "each one" if all(step.has_prints for step in run.steps) else "each one that is recorded"
        lines.append(f"all ranks have equal weights, before the first step and after {which}")
    if (
        run.world_size > 1
        and not {"same-samples", "peers-read-otherwise"} & found
        and run.steps
        and run.steps[0].samples(0)
    ):
        lines.append("at the same step, the ranks read different samples")
    return lines
