"""`train`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.verbs.running import Answer, Common, execute, make_task, with_run

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
    """Train `job`; `resume=""` goes on with its newest run, a path with that one."""
    common = common or Common()
    task = make_task("train", job, common, overrides)
    if common.dry_run:
        return Answer(exit_code=0, run=Path(task.run), value=task.as_json())
    task = with_run(task, resume=resume)
    task = replace(task, allow=tuple(allow), options={"evaluate_first": evaluate_first})
    return execute(task, entry=ENTRY, common=common)
