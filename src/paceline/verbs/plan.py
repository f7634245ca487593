"""`plan`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from paceline.errors import UsageError
from paceline.measure.probe.machines import machine_here
from paceline.plan.fleet import read_fleet
from paceline.plan.hardware import Fleet
from paceline.plan.machine import visible_gpus
from paceline.verbs.running import Answer, Common, execute, make_task, read_answer, with_run

ENTRY = "paceline.train.plan_run:plan"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which layouts of a job fit, how fast, and why the others do not."""

    job: Annotated[str, tyro.conf.Positional]
    cluster: str = "here"
    """here, 8xH100-80G, 4x8xA100-80G@eth-100g, or a TOML file with nodes, devices, links and prices."""
    ranks: int | None = None
    """Processes on this machine, where the cluster is `here`."""
    config: Path | None = None
    """A TOML file of settings."""
    run_dir: str | None = None
    """Where the answer and its log are kept."""
    dry_run: bool = False
    """Check what can be checked, start nothing."""
    json: bool = False
    """The answer for a script."""


def planned(options: PlanOptions, settings: Sequence[str]) -> Answer:
    """As it was typed."""
    common = Common(
        ranks=options.ranks,
        config=options.config,
        run_dir=options.run_dir,
        dry_run=options.dry_run,
        quiet=options.json,
    )
    return plan(options.job, cluster=options.cluster, common=common, overrides=settings)


def plan(
    job: str,
    *,
    cluster: str = "here",
    common: Common | None = None,
    overrides: Sequence[str] = (),
) -> Answer:
    """The layouts of a job that fit a cluster, with predicted memory and time, and why the others do not.

    `cluster` is `here` (with `ranks`), `8xH100-80G`, `4x8xA100-80G@ib-hdr`, or a TOML file.

    Raises:
        UsageError, Problems: a cluster or a setting that can't be read, all of it at once.
    """
    common = common or Common()
    if common.layout is not None:
        raise UsageError(
            f"plan looks for a layout, and was given {common.layout}.",
            hint=f"paceline plan {job}; or paceline compare {job} --layouts {common.layout} ddp to measure it",
        )
    ranks = common.ranks or 1
    fleet = None if cluster == "here" else read_fleet(cluster)
    task = make_task("plan", job, replace(common, layout="single", ranks=1, device="cpu"), overrides)
    if common.dry_run:
        return Answer(exit_code=0, run=Path(task.run), value=task.as_json())
    fleet = fleet or machine_here(ranks=ranks, device="cuda" if visible_gpus() >= ranks else "cpu").fleet
    task = with_run(replace(task, options={"fleet": fleet.as_json()}), resume=None)
    answer = execute(task, entry=ENTRY, common=replace(common, quiet=True))
    value = read_answer(task, "plan")
    if value is None:
        return answer
    lines = [*value.pop("lines"), *_corrected(fleet)]
    return replace(answer, value=value, screen="\n".join(lines))


def _corrected(fleet: Fleet) -> Iterator[str]:
    """That runs here have changed the forecast, and by how much."""
    for what, ratios in (("times", fleet.longer), ("bytes", fleet.fuller)):
        said = ", ".join(f"{family or 'all others'} × {ratio:.2f}" for family, ratio in ratios.items())
        if said:
            yield f"{what} are corrected by what runs here took beside their forecast: {said}"
