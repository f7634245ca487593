"""Compare two recordings of scripts: the same training, or the first difference and its likely cause.

There are three answers. *Can't be compared* always comes with its reason and what to type next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.console.formatting import first_names, plural
from paceline.errors import ExitCode
from paceline.script_check.comparison.continuation import find_continuation, lacks_optimizer_state, replayed_steps
from paceline.script_check.comparison.difference_cause import gradient_cause
from paceline.script_check.comparison.piece_comparison import (
    has_pieces,
    piece_cause,
    piece_records,
    unknown_pieces,
)
from paceline.script_check.comparison.rounding_drift import is_drift
from paceline.script_check.comparison.sample_comparison import (
    RunDifference,
    are_samples_seen,
    has_sequence_pieces,
    sample_difference,
    samples_of,
    setting_difference,
)
from paceline.script_check.comparison.script_records import comparable_records, equal_names, without_later_weights
from paceline.script_check.judge.rank_peers import RankPeers
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun, read_script_run
from paceline.script_check.judge.verdict import judge
from paceline.script_check.recording import ScriptRecording, UnknownPiece, read_origin
from paceline.verification.fingerprints.compare_recordings import Comparison, compare_recordings
from paceline.verification.fingerprints.fingerprint import Record

SAME, DIFFERENT, NOT_COMPARABLE = "same", "different", "can't be compared"
_MIN_LATER_STEPS = 2  # whose equal gradients show that weights which differ have no effect
_SMALL_SEED = 1 << 32  # torch's own seeds, of a script that seeds nothing, are almost always larger


@dataclass(frozen=True, kw_only=True)
class ScriptComparison:
    """The result; its fields are the keys of `--json`. `exit_code` is 0, 4 (different, or a finding) or 5.

    `step` and `parameter` are where the runs differ first. `findings` are what is wrong in one of the runs by itself.
    """

    exit_code: int
    verdict: str
    cause: str
    hint: str = ""
    step: int = 0
    parameter: str = ""
    samples: str = ""
    runs: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The result for a person."""
        lines = [*self.runs, *(f"WRONG  {finding}" for finding in self.findings)]
        lines += [f"samples: {self.samples}"] if self.samples else []
        lines += [f"note   {note}" for note in self.notes]
        word = {SAME: "SAME TRAINING", DIFFERENT: "DIFFERENT", NOT_COMPARABLE: "CAN'T BE COMPARED"}[self.verdict]
        where = f"first at step {self.step}{f' in {self.parameter}' if self.parameter else ''}: " if self.step else ""
        lines.append(f"{word}: {where}{self.cause}")
        if self.hint:
            lines.append(f"       to do: {self.hint}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Recorded:
    """A recording, the name of its folder, and what is wrong in it by itself."""

    name: str
    run: ScriptRun
    origin: ScriptRecording
    faults: Sequence[ScriptFinding]


@dataclass(frozen=True, kw_only=True)
class _Answer:
    verdict: str
    cause: str
    hint: str = ""
    step: int = 0
    parameter: str = ""
    notes: tuple[str, ...] = ()


def compare_scripts(one: Path, other: Path) -> ScriptComparison:
    """Compare two recordings of scripts, in either order.

    Raises:
        UsageError: a recording can't be read.
    """
    first, second = sorted((_read(one), _read(other)), key=lambda each: each.run.world_size)
    called = (first.name, second.name)
    if (resumed := _compare_resumed(first, second) or _compare_resumed(second, first)) is not None:
        return resumed
    samples = sample_difference(first.run, second.run, called)
    return _comparison(first, second, samples, _answer(first, second, samples))


def _compare_resumed(before: _Recorded, after: _Recorded) -> ScriptComparison | None:
    """Compare a run that begins with the weights after a step of the run before; None if it does not."""
    found = find_continuation(before.run, after.run)
    if found is None:
        return None
    rest = replace(before, run=found.rest)
    samples = sample_difference(rest.run, after.run, (before.name, after.name))
    answer = _answer(rest, after, samples)
    again = replayed_steps(before.run, after.run, last=found.step) if samples is not None else None
    if again is not None:
        answer = _Answer(
            verdict=DIFFERENT,
            cause=f"{after.name} reads the samples of steps {again[0]} to {again[1]} of {before.name} again: it starts"
            " the epoch from its beginning, although these were read already",
            hint="skip the batches that were read before the checkpoint, or save the state of the data loader, too",
            step=1,
        )
    elif answer.step == 1 and lacks_optimizer_state(found.rest, after.run):
        hint = "optimizer.load_state_dict() with the state of the checkpoint"
        answer = replace(answer, cause="the optimizer began without its state of the steps before", hint=hint)
    note = f"{after.name} continues {before.name} after its step {found.step}, from which the steps are counted"
    return _comparison(rest, after, samples, replace(answer, notes=(note, *answer.notes)))


def _comparison(
    first: _Recorded, second: _Recorded, samples: RunDifference | None, answer: _Answer
) -> ScriptComparison:
    are_seen = are_samples_seen(first.run, second.run)
    findings = [f"{each.name}: {_describe(finding)}" for each in (second, first) for finding in each.faults]
    is_wrong = answer.verdict == DIFFERENT or findings
    code = ExitCode.DIFFERENT if is_wrong else ExitCode.DONE if answer.verdict == SAME else ExitCode.NOT_JUDGED
    told = samples.text if samples else "the same at each step"
    if has_sequence_pieces(first.run, second.run):
        told = f"the ranks of {second.name} have pieces of the sequences, which are not compared"
    return ScriptComparison(
        exit_code=int(code),
        verdict=answer.verdict,
        cause=answer.cause,
        hint=answer.hint,
        step=answer.step,
        parameter=answer.parameter,
        samples=told if are_seen else "not seen",
        runs=tuple(_summary(each) for each in (first, second)),
        findings=tuple(findings),
        notes=answer.notes,
    )


def _read(path: Path) -> _Recorded:
    run, origin = read_script_run(path), read_origin(path)
    assert origin is not None
    faults = [finding for finding in judge(run).findings if not finding.is_note] if run.steps else []
    return _Recorded(path.name or str(path), run, origin, faults)


def _answer(first: _Recorded, second: _Recorded, samples: RunDifference | None) -> _Answer:
    """Return the verdict on two recordings, of which the second has at least as many ranks."""
    empty = next((each for each in (first, second) if not each.run.steps), None)
    if empty is not None:
        return _Answer(verdict=NOT_COMPARABLE, cause=f"{empty.name} has no step", hint="look into its output.log")
    fault = next((rank.fault for each in (first, second) for rank in each.run.ranks if rank.fault), "")
    if fault:
        return _Answer(verdict=NOT_COMPARABLE, cause=f"the recorder failed: {fault}")
    called = (first.name, second.name)
    settings = setting_difference(first.run, second.run, called)
    names = equal_names(first.run, second.run)
    if unknown := unknown_pieces(first.run):
        return _unknown_start(first, second, unknown)
    is_cut = has_pieces(first.run)
    records = (
        piece_records(first.run, second.run)
        if is_cut
        else (comparable_records(first.run, {}), comparable_records(second.run, names))
    )
    difference, text, notes = _first_difference(*records, is_alike=settings is None)
    if difference is None:
        return _answer_without_difference(first, second, samples, settings, text, notes)
    step, parameter = int(difference["step"]), str(difference["parameter"])
    if not step:
        return _Answer(verdict=NOT_COMPARABLE, cause=difference["cause"], hint=_start_hint(first, second), notes=notes)
    early = next((f for each in (second, first) for f in each.faults if f.step <= step), None)
    if early is not None:
        return _Answer(
            verdict=DIFFERENT, cause=early.text, hint=early.hint, step=step, parameter=parameter, notes=notes
        )
    if settings is not None and settings.step <= step and not (samples and samples.step < settings.step):
        return _Answer(verdict=DIFFERENT, cause=settings.text, hint=settings.hint, step=step, parameter=parameter)
    if samples is not None and samples.step <= step:
        return _by_samples(samples, step=step, parameter=parameter)
    if difference["kind"] != "gradient" or "only one run" in difference["cause"]:
        return _Answer(verdict=DIFFERENT, cause=difference["cause"], step=step, parameter=parameter, notes=notes)
    if _has_fed_inputs_alone(first.run) or _has_fed_inputs_alone(second.run):
        return _Answer(
            verdict=NOT_COMPARABLE,
            cause="the fed batches went into the model alone, and its loss is computed outside, on other targets",
            hint="only a script with a DataLoader, or a model that computes its loss, can be fed",
            step=step,
            parameter=parameter,
        )
    cause = (
        piece_cause(first.run, second.run, step=step, called=called)
        if is_cut
        else gradient_cause(first.run, second.run, step=step, parameter=parameter, names=names, called=called)
    )
    return _Answer(
        verdict=NOT_COMPARABLE if cause.is_random else DIFFERENT,
        cause=cause.text,
        hint=cause.hint,
        step=step,
        parameter=parameter,
        notes=notes,
    )


def _unknown_start(first: _Recorded, second: _Recorded, unknown: Sequence[UnknownPiece]) -> _Answer:
    """Return the answer if ranks begin with weights that the one process does not have."""
    names = first_names([f"{each.name} of rank {each.rank}" for each in unknown])
    return _Answer(
        verdict=NOT_COMPARABLE,
        cause=f"{plural(len(unknown), 'parameter')} of the ranks, as {names}, begin with values that are nowhere in the"
        f" weights of {first.name}: the start weights of {second.name} depend on the number of ranks",
        hint="draw each whole weight with a seed that all ranks have in common, and cut it then; or start both commands"
        " from the same checkpoint",
    )


def _start_hint(first: _Recorded, second: _Recorded) -> str:
    """Return what makes two runs start from the same weights: a seed, if the scripts seed nothing themselves."""
    seeds = [each.run.ranks[0].header.seed for each in (first, second)]
    if max(seeds) >= _SMALL_SEED or not all(seeds):
        return "--seed 0 for both recordings; or the same checkpoint"
    if seeds[0] != seeds[1]:
        return f"the same seed in both commands: it is {seeds[0]} in {first.name}, and {seeds[1]} in {second.name}"
    return (
        f"start both from the same checkpoint: both scripts have seed {seeds[0]}, and make other weights from it, as if"
        " the model depends on the number of ranks"
    )


def _first_difference(
    first: list[Record], second: list[Record], *, is_alike: bool
) -> tuple[dict[str, Any] | None, str, tuple[str, ...]]:
    """Return the first difference of gradients or weights, the text on all steps, and notes.

    A weight that differs, while the gradients of several later steps are equal, has no effect: rounding moves it where
    its true gradient is zero. A wrong update would show in the next gradients. `is_alike`: both runs have the same
    settings.
    """
    found = compare_recordings(first, second, same_ranks=False)
    difference = found.first
    if difference is None or not difference["step"] or not is_alike:
        return difference, _equal_text(first, second, found), ()
    if difference["kind"] != "weight":
        step = int(difference["step"])
        if not is_drift(first, second, step=step):
            return difference, "", ()
        first, second = ([record for record in each if record.step < step] for each in (first, second))
        before = compare_recordings(first, second, same_ranks=False)
        note = (
            f"from step {step} on, the runs drift apart ({difference['distance']:.1e} in {difference['parameter']}), as"
            " rounding makes them do: not judged"
        )
        return None, _equal_text(first, second, before), (note,)
    later = compare_recordings(without_later_weights(first), without_later_weights(second), same_ranks=False)
    end = int(later.first["step"]) if later.first else min(first[-1].step, second[-1].step) + 1
    count = end - int(difference["step"]) - 1
    if count < _MIN_LATER_STEPS:
        return difference, "", ()
    note = (
        f"weights of {difference['parameter']} differ from step {difference['step']} on, and no gradient of the next"
        f" {plural(count, 'step')} does: they have no effect, and are not judged"
    )
    return later.first, _equal_text(first, second, later), (note,)


def _equal_text(first: Sequence[Record], second: Sequence[Record], found: Comparison) -> str:
    """Return how far the gradients of runs without a difference are apart; those that are only rounding don't count."""
    by_key = {(record.step, record.optimizer): record for record in second}
    distances = [
        each.distance(by_key[record.step, record.optimizer].gradients[name])
        for record in first
        if (record.step, record.optimizer) in by_key
        for name, each in record.gradients.items()
        if name in by_key[record.step, record.optimizer].gradients and name not in found.unjudged
    ]
    steps = plural(found.steps, "step")
    if found.verdict == "bitwise":
        return f"bitwise, {steps}"
    return f"equal up to rounding, {steps}; gradients differ by at most {max(distances, default=0.0):.1e} of their norm"


def _answer_without_difference(
    first: _Recorded,
    second: _Recorded,
    samples: RunDifference | None,
    settings: RunDifference | None,
    text: str,
    notes: tuple[str, ...],
) -> _Answer:
    if settings is not None:
        return _Answer(verdict=DIFFERENT, cause=settings.text, hint=settings.hint, notes=notes)
    if samples is not None:
        return _by_samples(samples)
    counts = first.run.last_step, second.run.last_step
    if counts[0] != counts[1] and not (first.origin.steps or second.origin.steps):
        cause = f"{text}; then {first.name} ends after {counts[0]} steps, and {second.name} after {counts[1]}"
        return _Answer(verdict=DIFFERENT, cause=cause, hint="the same drop_last, epochs and batch size", notes=notes)
    return _Answer(verdict=SAME, cause=text, notes=notes)


def _by_samples(samples: RunDifference, *, step: int = 0, parameter: str = "") -> _Answer:
    verdict = DIFFERENT if samples.is_unequal_count else NOT_COMPARABLE
    return _Answer(verdict=verdict, cause=samples.text, hint=samples.hint, step=step, parameter=parameter)


def _has_fed_inputs_alone(run: ScriptRun) -> bool:
    """Return whether a model got fed inputs while its loss is computed outside of it."""
    return any(
        call.is_fed and not call.returns_loss for step in run.steps for rank in step.ranks for call in rank.calls
    )


def _summary(recorded: _Recorded) -> str:
    run = recorded.run
    count = sum(samples_of(run.steps[0], RankPeers(run)).values()) if run.steps else 0
    fed = f", with the batches of {Path(recorded.origin.fed).name}" if recorded.origin.fed else ""
    steps, ranks = plural(run.last_step, "step"), plural(run.world_size, "rank")
    return f"{recorded.name}: {steps} of {ranks}, {plural(count, 'sample')} in the first step{fed}"


def _describe(finding: ScriptFinding) -> str:
    since = f"from step {finding.step} on: " if finding.step else ""
    where = f" ({finding.line})" if finding.line else ""
    return f"{since}{finding.text}{where}"
