"""The `verify` verb: checks that a layout or an update rule trains as its reference in one process does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.commands.command_table import VerbOutput, VerifyOptions
from paceline.commands.common.comparisons.verify_against import verify_against
from paceline.commands.common.dry_run import check_start
from paceline.commands.common.execution import (
    CommandOutcome,
    RunOptions,
    execute,
    failure_result,
    make_task,
    read_result,
    run_options,
)
from paceline.commands.common.start_folder import assign_run_folder
from paceline.config.layout import parse_layout
from paceline.config.parse_auto_layout import AUTO, is_auto
from paceline.config.task import Task
from paceline.config.update_rule import UpdateRule, parse_update
from paceline.errors import ExitCode, LayoutError, RunError, UsageError
from paceline.launch.run_outcome import failure_screen
from paceline.planner.layout.update_rule_checks import rule_planning

_EXIT_CODES = {"different": ExitCode.DIFFERENT, "undecided": ExitCode.FAILED}
ENTRY = "paceline.verification.verify_worker:verify"


def verify(
    job: str,
    *,
    common: RunOptions | None = None,
    overrides: Sequence[str] = (),
    steps: int = 3,
    against: str = "single",
) -> CommandOutcome:
    """Compare the training of `job` in a layout with that in one process, or with `against`, a layout or a recording.

    The exit code is 4 if they differ, and 1 if nothing could be compared.
    """
    common = common or RunOptions()
    if steps < 1:
        raise UsageError(f"--steps {steps}: verify needs at least one step.", hint="--steps 3")
    if against != "single":
        return verify_against(job, common=common, overrides=overrides, steps=steps, against=against)
    if is_auto(common.layout):
        common, overrides = _choose_auto_layout(job, common, overrides)
    update = parse_update(common.update)
    _refuse_races(update, job)
    update, steps = rule_planning(update).shorten_for_check(update, steps=steps)
    common = replace(common, update=str(update), layout=common.layout or update.layout)
    task = make_task("verify", job, common, overrides)
    _refuse_rounding(task)
    if common.dry_run:
        return CommandOutcome(exit_code=0, run=Path(task.run), value=task.as_json(), screen=check_start(task))
    task = assign_run_folder(replace(task, options={"steps": steps}), resume=None)
    outcome = execute(task, entry=ENTRY, common=common, one_thread=True)
    value = read_result(task, "verify")
    if value is None:
        return outcome
    code = _EXIT_CODES.get(value["verdict"], outcome.exit_code)
    return replace(outcome, exit_code=int(code), value=value, screen="\n".join(value["lines"]))


def _choose_auto_layout(job: str, common: RunOptions, overrides: Sequence[str]) -> tuple[RunOptions, Sequence[str]]:
    """Return the options and settings with the layout and microbatch size that `auto` would choose for training.

    Raises:
        RunError: the plan failed.
    """
    from paceline.measured_planning.auto_layout import refuse_auto_options, resolve_auto_layout

    refuse_auto_options(update=common.update, compress=common.compress)
    task = assign_run_folder(make_task("verify", job, replace(common, layout=None), overrides), resume=None)
    task, failed_launch = resolve_auto_layout(task, quiet=common.quiet)
    if failed_launch is not None:
        raise RunError(
            "--layout auto: the plan failed.", cause=failure_screen(failed_launch), hint=f"paceline plan {job}"
        )
    layout_settings = [f"--{name}={value}" for name, value in task.settings.items() if task.origins.get(name) == AUTO]
    return replace(common, layout=task.layout, run_dir=task.run), [*overrides, *layout_settings]


def _refuse_races(update: UpdateRule, job: str) -> None:
    """Refuse an update rule whose result depends on timing, because it has no single correct result to compare with."""
    if update.has_races:
        raise UsageError(
            f"verify has no verdict on {update.kind}: races make every run different, and each one is valid.",
            cause="workers read and write the same weights without synchronisation",
            hint=f"paceline train {job} --ranks 2 --update {update.kind}, then the same command without --update, "
            "then paceline compare RUN RUN",
        )


def _refuse_rounding(task: Task) -> None:
    """Refuse `params` other than fp32: each parameter is then rounded at each use, which one process does not do."""
    layout = parse_layout(task.layout)
    if layout.params == "fp32":
        return
    without_rounding = replace(layout, params="fp32")
    raise LayoutError(
        f"verify can't judge params={layout.params}: it rounds every parameter, and one process rounds none.",
        where=f"--layout {layout}",
        cause="every tensor would differ by that rounding, which could hide a real error",
        hint=f"--layout {without_rounding}, which differs only by that rounding",
    )


def run_verb(options: VerifyOptions, settings: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    outcome = verify(
        options.job, common=run_options(options), overrides=settings, steps=options.steps, against=options.against
    )
    outcome = failure_result(outcome)
    if not outcome.prints_result:
        return outcome.exit_code, None, ""
    return outcome.exit_code, outcome.summary() if outcome.value is None else outcome.value, outcome.screen
