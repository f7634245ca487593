"""Two recordings of scripts in the form in which recordings of `pl.record` are compared: whole tensors, equal names."""

from collections.abc import Mapping
from dataclasses import replace

from paceline.script_check.judge.script_run import ScriptRun, ScriptStep
from paceline.script_check.recording import TensorPrint
from paceline.verification.fingerprints.fingerprint import FLOAT32_EPS, Fingerprint, Record


def comparable_records(run: ScriptRun, names: Mapping[str, str]) -> list[Record]:
    """Return the steps of a run that have summaries.

    `names` are those of the other run for parameters that are called otherwise there.
    """
    return [_record(step, names) for step in [*run.start, *run.steps] if step.has_prints]


def without_later_weights(records: list[Record]) -> list[Record]:
    """Return the records with the weights before the first step alone."""
    return [record if not record.step else replace(record, weights={}) for record in records]


def equal_names(first: ScriptRun, second: ScriptRun) -> dict[str, str]:
    """Return the first run's names for parameters that the second one calls by a longer or shorter name.

    One run may train a model inside another module, as Lightning does.
    """
    own, other = _parameter_names(first), _parameter_names(second)
    found = {
        name: match
        for name in other - own
        for match in own - other
        if name.endswith(f".{match}") or match.endswith(f".{name}")
    }
    return found if len(set(found.values())) == len(found) else {}


def fingerprint_of(tensor: TensorPrint, *, eps: float) -> Fingerprint:
    """Return the fingerprint of a tensor that was computed in a type with this machine epsilon."""
    return Fingerprint(
        numel=tensor.numel,
        norm=tensor.norm,
        largest=tensor.largest,
        projections=tensor.projections,
        digest=str(tensor.digest),
        eps=max(FLOAT32_EPS, eps),
        faint_share=tensor.faint_share,
    )


def step_eps(step: ScriptStep) -> float:
    """Return the machine epsilon of the coarsest type that a rank computed in."""
    return max(rank.eps for rank in step.ranks)


def _record(step: ScriptStep, names: Mapping[str, str]) -> Record:
    eps = step_eps(step)

    def fingerprints(of_ranks: tuple[Mapping[str, TensorPrint], ...]) -> dict[str, Fingerprint]:
        first = {name: each for of_rank in reversed(of_ranks) for name, each in of_rank.items()}
        return {names.get(name, name): fingerprint_of(each, eps=eps) for name, each in first.items()}

    return Record(
        step=step.number,
        optimizer=step.optimizer,
        gradients=fingerprints(step.gradients),
        weights=fingerprints(step.weights),
    )


def _parameter_names(run: ScriptRun) -> set[str]:
    return {name for step in run.start for name in step.weights[0]}
