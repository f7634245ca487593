"""`train`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import ExitCode, raise_all
from paceline.spec.allowances import refuse_unknown_allowances
from paceline.spec.auto import AUTO, is_auto
from paceline.store.checkpoints import LATEST, marked, step_of
from paceline.store.runs import RunFolder
from paceline.verbs.running import Answer, Common, answer_of, execute, make_task, with_run
from paceline.watch.history import json_or_none, read_history

ENTRY = "paceline.train.worker:train"


def train(
    job: str,
    *,
    common: Common | None = None,
    overrides: Sequence[str] = (),
    resume: str | None = None,
    allow: Sequence[str] = (),
    evaluate_first: bool = False,
) -> Answer:
    """Train `job`; `resume=""` goes on with its newest run, a path with that one.

    With the layout `auto` it is planned first, and falls back to a layout that needs less where memory is short.
    """
    common = common or Common()
    raise_all(refuse_unknown_allowances(tuple(allow)))
    chooses = is_auto(common.layout)
    if chooses:
        from paceline.train.auto import fallen_back, refuse_auto, settled

        refuse_auto(update=common.update, compress=common.compress)
    task = make_task("train", job, replace(common, layout=None) if chooses else common, overrides)
    if common.dry_run:
        task = replace(task, layout=AUTO) if chooses else task
        return Answer(exit_code=0, run=Path(task.run), value=task.as_json())
    task = with_run(task, resume=resume)
    task = replace(task, allow=tuple(allow), options={"evaluate_first": evaluate_first})
    if chooses:
        task, failed = settled(task, quiet=common.quiet)
        if failed is not None:
            return answer_of(replace(task, layout=AUTO), failed)
    answer = execute(task, entry=ENTRY, common=common)
    while chooses and (then := fallen_back(task, answer.failure)) is not None:
        task = then
        answer = execute(task, entry=ENTRY, common=common)
    return answer


def came_to(answer: Answer) -> dict[str, Any]:
    """Of a run that ended whole: its last step, its last evaluation and, where it was written, the weights' digest."""
    run = RunFolder(answer.run)
    latest = marked(run.checkpoints, LATEST)
    if answer.exit_code not in (ExitCode.DONE, ExitCode.STOPPED) or latest is None:
        return {}
    step, weights = step_of(latest), json_or_none(run.path / "weights.json")
    found: dict[str, Any] = {"step": step, "evaluation": None, "digest": None}
    told = [event for event in read_history(run).of("EvalDone") if event.get("step", step + 1) <= step]
    if told:
        found["evaluation"] = {name: told[-1].get(name) for name in ("step", "split", "metrics")}
    if answer.exit_code == ExitCode.DONE and isinstance(weights, dict) and weights.get("step") == step:
        found["digest"] = weights.get("digest")
    return found
