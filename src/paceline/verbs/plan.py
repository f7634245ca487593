"""`plan`."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from paceline.errors import UsageError
from paceline.launch.environments import detect
from paceline.measure.probe.here import SECONDS as PROBE_SECONDS
from paceline.measure.probe.machines import machine_here
from paceline.plan.fleet import read_fleet
from paceline.plan.hardware import Fleet, fleet_of
from paceline.plan.here import node_memory
from paceline.spec.task import Task
from paceline.verbs.running import Answer, Common, execute, make_task, read_answer, with_run

ENTRY = "paceline.train.plan_run:plan"
TRIAL_SECONDS = 30.0  # to time layouts on this machine, beside the probe


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which layouts of a job fit, how fast, and why the others do not."""

    job: Annotated[str, tyro.conf.Positional]
    cluster: str = "here"
    """here, 8xH100-80G, 4x8xA100-80G@eth-100g, or a TOML file with nodes, devices, links and prices."""
    ranks: int | None = None
    """Processes on this machine, where the cluster is `here`."""
    device: str = "auto"
    """auto, cpu or cuda, where the cluster is `here`."""
    seconds: float = TRIAL_SECONDS
    """For timing layouts, where the cluster is `here`; 0 takes what the probe forecasts."""
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
        device=options.device,
        config=options.config,
        run_dir=options.run_dir,
        dry_run=options.dry_run,
        quiet=options.json,
    )
    return plan(options.job, cluster=options.cluster, seconds=options.seconds, common=common, overrides=settings)


def plan(
    job: str,
    *,
    cluster: str = "here",
    seconds: float = TRIAL_SECONDS,
    common: Common | None = None,
    overrides: Sequence[str] = (),
) -> Answer:
    """The layouts of a job that fit a cluster, with predicted memory and time, and why the others do not.

    `cluster` is `here` (with `ranks`), `8xH100-80G`, `4x8xA100-80G@ib-hdr`, or a TOML file. What is here is probed
    once, and layouts are timed for so many `seconds`.

    Raises:
        UsageError, Problems: a cluster or a setting that can't be read, all of it at once.
    """
    common = common or Common()
    if common.layout is not None:
        raise UsageError(
            f"plan looks for a layout, and was given {common.layout}.",
            hint=f"paceline plan {job}; or paceline compare {job} --layouts {common.layout} ddp to measure it",
        )
    fleet = None if cluster == "here" else read_fleet(cluster)
    own = common if fleet is None else replace(common, layout="single", ranks=1, device="cpu")
    task = make_task("plan", job, own, overrides)
    if common.dry_run:
        return Answer(exit_code=0, run=Path(task.run), value=task.as_json())
    options = {"fleet": fleet.as_json()} if fleet is not None else {"here": _here(task, seconds)}
    task = with_run(replace(task, options=options), resume=None)
    answer = execute(task, entry=ENTRY, common=replace(common, quiet=True))
    value = read_answer(task, "plan")
    if value is None:
        return answer
    lines = [*value.pop("lines"), *_corrected(fleet_of(value["cluster"]))]
    return replace(answer, value=value, screen="\n".join(lines))


def _here(task: Task, seconds: float) -> dict[str, Any]:
    """What a probe found of this machine; where a launcher has started the ranks, they find it themselves."""
    own: dict[str, Any] = {"seconds": seconds}
    joined = detect(os.environ)
    if joined is not None:
        local = joined.local_world_size
        return own | {"probe_seconds": PROBE_SECONDS, "ranks_per_node": local, "node_bytes": node_memory(task.device)}
    return own | {"fleet": machine_here(ranks=task.ranks, device=task.device).fleet.as_json()}


def _corrected(fleet: Fleet) -> Iterator[str]:
    """That runs here have changed the forecast, and by how much."""
    for what, ratios in (("times", fleet.longer), ("bytes", fleet.fuller)):
        said = ", ".join(f"{family or 'all others'} × {ratio:.2f}" for family, ratio in ratios.items())
        if said:
            yield f"{what} are corrected by what runs here took beside their forecast: {said}"
