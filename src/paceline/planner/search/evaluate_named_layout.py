"""Lookup of a layout by its name on a cluster: its candidate, or why the model cannot have it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.config.from_json import as_written
from paceline.config.layout import Layout, LayoutKind, parse_layout
from paceline.errors import LayoutError, PacelineError, UsageError, raise_all
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.forecast_margins import bytes_margin
from paceline.planner.cost.layout_candidate import MICRO, Candidate, candidate_of
from paceline.planner.cost.memory import Memory
from paceline.planner.cost.step_time import StepTime
from paceline.planner.hardware.cluster import fleet_of
from paceline.planner.hardware.efficiency import Efficiency, default_efficiency
from paceline.planner.layout.axis_products import check_axis_products
from paceline.planner.layout.mesh import Mesh, mesh_of
from paceline.planner.model_costs.model_profile import ModelProfile, read_facts
from paceline.planner.search.branch_and_bound import key_of
from paceline.planner.search.search_space import SearchSpace, micro_batch_sizes, words_of

_MICRO = "train.micro_batch_size"


def estimate_named(
    forecast: CostModel, text: str, *, micro_batch_size: int | None = None, most: int | None = None
) -> Estimate:
    """Return the estimate of a layout as a user types it.

    Without a `micro_batch_size`, choose the fastest size that fits, or the one that needs least memory if none does, of
    at `most` this many samples.

    Raises:
        LayoutError, Problems: the layout does not fit these ranks, or the model cannot have it.
    """
    layout = parse_layout(text)
    every = _candidates(forecast, layout, micro_batch_size)
    found = [forecast.estimate(one) for one in every if most is None or one.micro_batch_size <= most or one is every[0]]
    fit = [one for one in found if one.fits]
    return min(fit, key=key_of) if fit else min(found, key=lambda one: one.peak_bytes)


def estimate_told(forecast: CostModel, row: Mapping[str, Any]) -> Estimate:
    """Return the estimate of a row of plan.json, with the bytes and seconds that the row states.

    Raises:
        UsageError: the row is of a layout that is impossible.
    """
    if "settings" not in row:
        why = row.get("why", "no reason is recorded")
        raise UsageError(f"{row['layout']} is not possible: {why}.", hint="paceline plan job.py --layout L")
    told = as_written(row, _Row)
    micro = as_written(told.settings.get(_MICRO), int)
    found = estimate_named(forecast, told.layout, micro_batch_size=micro)
    memory = Memory(**_known(Memory, told.parts), host_bytes=told.host_bytes)
    margin = bytes_margin(memory, forecast.fleet.device, is_replayed=bool(row.get("replayed")))
    return replace(found, memory=memory, margin_bytes=margin, seconds=StepTime(**_known(StepTime, told.seconds)))


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The fields of a plan.json row that are read back."""

    layout: str
    settings: Mapping[str, str]
    parts: Mapping[str, float]
    seconds: Mapping[str, float]
    host_bytes: float


def row_named(advice: Mapping[str, Any], layout: str | None = None) -> Mapping[str, Any]:
    """Return the plan.json row of a layout, by default that of the recommended one.

    Raises:
        UsageError: the plan has no such row, or no layout that fits.
    """
    wanted = layout or advice.get("recommended")
    if wanted is None:
        raise UsageError("the plan has no layout that fits.", hint="paceline plan job.py, which searches for one")
    names = [row["layout"] for row in advice["plans"]]
    if wanted not in names:
        raise UsageError(
            f"the plan has no layout {wanted}.", cause=f"it has {' · '.join(names)}", hint=f"--layout {names[0]}"
        )
    return next(row for row in advice["plans"] if row["layout"] == wanted)


def forecast_of(advice: Mapping[str, Any]) -> CostModel:
    """Return the cost model that plan.json was made with; efficiency constants unknown to this version are ignored.

    Raises:
        UsageError: the plan does not state its model or its cluster.
    """
    if not {"facts", "cluster"} <= set(advice):
        raise UsageError(
            "the plan does not state its model or its cluster.", hint="paceline plan job.py --run-dir FOLDER"
        )
    fleet = fleet_of(advice["cluster"])
    given = _known(Efficiency, as_written(advice.get("efficiency", {}), dict[str, float]))
    efficiency = replace(default_efficiency(fleet.device), **given)
    return CostModel(facts=read_facts(advice["facts"]), fleet=fleet, efficiency=efficiency)


def _known(kind: type, found: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that have a field in the dataclass `kind`."""
    return {field.name: found[field.name] for field in fields(kind) if field.name in found}


def mesh_named(layout: Layout, *, ranks: int) -> Mesh:
    """Return the layout's mesh for this many ranks (one for a single process), whatever the model is.

    Raises:
        LayoutError, Problems: there is no such mesh, or plans do not cover such a layout.
    """
    if layout.kind is LayoutKind.THREADS:
        raise LayoutError("threads are replicas in one process, which plan does not support.", hint="--layout ddp")
    if layout.remat.startswith("every"):
        raise LayoutError(
            f"a plan forecasts remat=none, selective and full; {layout.remat} is between none and full.",
            hint=f"--layouts {str(layout).replace(layout.remat, 'none')} {str(layout).replace(layout.remat, 'full')}",
        )
    problems = list[PacelineError]()
    mesh = mesh_of(layout, ranks=1 if layout.kind is LayoutKind.SINGLE else ranks, problems=problems)
    raise_all([*problems, *check_axis_products(layout, mesh)])
    return mesh


def _candidates(forecast: CostModel, layout: Layout, micro_batch_size: int | None) -> list[Candidate]:
    facts = forecast.facts
    mesh = mesh_named(layout, ranks=forecast.fleet.ranks)
    if mesh.replicas > facts.global_batch_size:
        raise LayoutError(
            f"{layout} has {mesh.replicas:,} replicas for a global batch of {facts.global_batch_size:,}.",
            hint=f"--train.global_batch_size {mesh.replicas}, or fewer replicas",
        )
    share = -(-facts.global_batch_size // mesh.replicas)
    if micro_batch_size is not None and not 1 <= micro_batch_size <= share:
        raise UsageError(
            f"micro_batch_size {micro_batch_size} is not between 1 and the {share} samples of a replica of {layout}.",
            hint=f"--train.micro_batch_size {share}",
        )
    sizes = (
        [micro_batch_size]
        if micro_batch_size
        else micro_batch_sizes(facts.global_batch_size, mesh.replicas, SearchSpace())
    )
    had = [size for size in sizes if f"{MICRO}={size}" not in facts.refused]
    if not had:
        raise LayoutError(
            f"{layout} in microbatches of {sizes[0]} is not possible: "
            f"{facts.refused[f'{MICRO}={sizes[0]}'].rstrip('.')}."
        )
    precision, compiles = facts.precision, facts.compiles
    found = [candidate_of(layout, mesh, micro_batch_size=n, precision=precision, compiles=compiles) for n in had]
    _refuse(found[0], facts)
    return found


def _refuse(candidate: Candidate, facts: ModelProfile) -> None:
    for word in words_of(candidate):
        if word in facts.refused:
            raise LayoutError(
                f"{candidate.layout} is not possible: {facts.refused[word].rstrip('.')}.", hint="another layout"
            )
    known = {"tp": facts.tp_sizes, "cp": facts.cp_sizes, "ep": facts.ep_sizes}
    for axis, sizes in known.items():
        size = getattr(candidate, axis)
        if size > 1 and size not in sizes:
            has = f"{axis} of {', '.join(map(str, sizes))}" if sizes else f"no {axis}"
            hint = f"--layout {axis}={sizes[-1]}" if sizes else "--layout fsdp"
            raise LayoutError(f"{axis}={size}: the model allows {has}.", hint=hint)
    if candidate.zero == 3 and facts.optimizer.whole_tensors:
        raise LayoutError(f"{candidate.layout}: {facts.optimizer.name} needs whole tensors.", hint="--layout zero1")
