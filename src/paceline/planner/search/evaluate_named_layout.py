"""Estimate single layouts: those that a user names, and the rows of a plan.json."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.config.from_json import convert_json
from paceline.config.layout import Layout, LayoutKind, parse_layout
from paceline.errors import LayoutError, PacelineError, UsageError, raise_all
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.forecast_margins import bytes_margin
from paceline.planner.cost.layout_candidate import MICRO_BATCH_KEY, Candidate, candidate_from_layout
from paceline.planner.cost.memory import Memory
from paceline.planner.cost.step_time import StepTime
from paceline.planner.hardware.cluster import cluster_from_json
from paceline.planner.hardware.efficiency import Efficiency, default_efficiency
from paceline.planner.layout.mesh import Mesh, resolve_mesh
from paceline.planner.layout.pipeline_options import refuse_schedule
from paceline.planner.model_costs.model_profile import ModelProfile, model_profile_from_json
from paceline.planner.search.branch_and_bound import sort_key
from paceline.planner.search.search_space import SearchSpace, micro_batch_sizes, option_keys

_MICRO_BATCH_SETTING = "train.micro_batch_size"


def estimate_named(
    cost_model: CostModel, text: str, *, micro_batch_size: int | None = None, max_micro_batch_size: int | None = None
) -> Estimate:
    """Return the estimate of a layout that a user typed.

    Without a `micro_batch_size`, choose the fastest size that fits or, if none fits, the size that needs least memory.
    Sizes above `max_micro_batch_size` are skipped, except the smallest possible size.

    Raises:
        LayoutError, Problems: the layout does not fit these ranks, or the model cannot have it.
    """
    layout = parse_layout(text)
    by_size = _candidates_by_size(cost_model, layout, micro_batch_size)
    estimates = [
        cost_model.estimate(candidate)
        for candidate in by_size
        if max_micro_batch_size is None or candidate.micro_batch_size <= max_micro_batch_size or candidate is by_size[0]
    ]
    fitting = [estimate for estimate in estimates if estimate.fits]
    return min(fitting, key=sort_key) if fitting else min(estimates, key=lambda estimate: estimate.peak_bytes)


def estimate_from_row(cost_model: CostModel, row: Mapping[str, Any]) -> Estimate:
    """Return the estimate of a row of plan.json, with the bytes and seconds that the row states.

    Raises:
        UsageError: the row states that its layout is impossible.
    """
    if "settings" not in row:
        reason = row.get("why", "no reason is recorded")
        raise UsageError(f"{row['layout']} is not possible: {reason}.", hint="paceline plan job.py --layout L")
    part = f"row of layout {row['layout']}"
    stored_row = convert_json(row, _Row, part=part)
    micro_batch_size = convert_json(
        stored_row.settings.get(_MICRO_BATCH_SETTING), int, part=f"{_MICRO_BATCH_SETTING} in the {part}"
    )
    estimate = estimate_named(cost_model, stored_row.layout, micro_batch_size=micro_batch_size)
    memory = Memory(**_known_fields(Memory, stored_row.parts), host_bytes=stored_row.host_bytes)
    margin = bytes_margin(memory, cost_model.cluster.device, is_replayed=bool(row.get("replayed")))
    return replace(
        estimate, memory=memory, margin_bytes=margin, seconds=StepTime(**_known_fields(StepTime, stored_row.seconds))
    )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The fields of a row of plan.json that `estimate_from_row` reads."""

    layout: str
    settings: Mapping[str, str]
    parts: Mapping[str, float]
    """The bytes by field of `Memory`."""
    seconds: Mapping[str, float]
    """The seconds by field of `StepTime`."""
    host_bytes: float


def find_row(plan: Mapping[str, Any], layout: str | None = None) -> Mapping[str, Any]:
    """Return the row of a layout in plan.json, by default that of the recommended layout.

    Raises:
        UsageError: the plan has no such row, or no layout that fits.
    """
    requested = layout or plan.get("recommended")
    if requested is None:
        raise UsageError("the plan has no layout that fits.", hint="paceline plan job.py, which searches for one")
    names = [row["layout"] for row in plan["plans"]]
    if requested not in names:
        raise UsageError(
            f"the plan has no layout {requested}.", cause=f"it has {' · '.join(names)}", hint=f"--layout {names[0]}"
        )
    return next(row for row in plan["plans"] if row["layout"] == requested)


def cost_model_from_json(plan: Mapping[str, Any]) -> CostModel:
    """Return the cost model of a plan.json. Efficiency constants that this version of Paceline lacks are ignored.

    Raises:
        UsageError: the plan does not state its model or its cluster.
    """
    if not {"facts", "cluster"} <= set(plan):
        raise UsageError(
            "the plan does not state its model or its cluster.", hint="paceline plan job.py --run-dir FOLDER"
        )
    cluster = cluster_from_json(plan["cluster"])
    constants = _known_fields(
        Efficiency, convert_json(plan.get("efficiency", {}), dict[str, float], part='"efficiency"')
    )
    efficiency = replace(default_efficiency(cluster.device), **constants)
    return CostModel(profile=model_profile_from_json(plan["facts"]), cluster=cluster, efficiency=efficiency)


def _known_fields(kind: type, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values whose names are fields of the dataclass `kind`."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def mesh_for_plan(layout: Layout, *, ranks: int) -> Mesh:
    """Return the mesh of a layout for this many ranks, without a check of the model. `single` always has one rank.

    Raises:
        LayoutError, Problems: the mesh is impossible, or plans do not support this kind of layout.
    """
    if layout.kind is LayoutKind.THREADS:
        raise LayoutError("threads are replicas in one process, which plan does not support.", hint="--layout ddp")
    if layout.remat.startswith("every"):
        raise LayoutError(
            f"a plan does not forecast remat={layout.remat}, whose memory is between that of none and full.",
            hint=f"--layouts {str(layout).replace(layout.remat, 'none')} {str(layout).replace(layout.remat, 'full')}",
        )
    problems = list[PacelineError]()
    mesh = resolve_mesh(layout, ranks=1 if layout.kind is LayoutKind.SINGLE else ranks, problems=problems)
    raise_all([*problems, *refuse_schedule(layout, mesh)])
    return mesh


def _candidates_by_size(cost_model: CostModel, layout: Layout, micro_batch_size: int | None) -> list[Candidate]:
    """Return the candidates of a layout by ascending microbatch size, or only the one of `micro_batch_size`.

    Raises:
        LayoutError, UsageError: the ranks, the batch or the model do not allow the layout or the size.
    """
    profile = cost_model.profile
    mesh = mesh_for_plan(layout, ranks=cost_model.cluster.ranks)
    if mesh.replicas > profile.global_batch_size:
        raise LayoutError(
            f"{layout} has {mesh.replicas:,} replicas for a global batch of {profile.global_batch_size:,}.",
            hint=f"--train.global_batch_size {mesh.replicas}, or fewer replicas",
        )
    samples_per_replica = -(-profile.global_batch_size // mesh.replicas)
    if micro_batch_size is not None and not 1 <= micro_batch_size <= samples_per_replica:
        raise UsageError(
            f"micro_batch_size {micro_batch_size} is not between 1 and the {samples_per_replica} samples of a replica "
            f"of {layout}.",
            hint=f"--train.micro_batch_size {samples_per_replica}",
        )
    sizes = (
        [micro_batch_size]
        if micro_batch_size
        else micro_batch_sizes(profile.global_batch_size, mesh.replicas, SearchSpace())
    )
    possible_sizes = [size for size in sizes if f"{MICRO_BATCH_KEY}={size}" not in profile.refused]
    if not possible_sizes:
        raise LayoutError(
            f"{layout} in microbatches of {sizes[0]} is not possible: "
            f"{profile.refused[f'{MICRO_BATCH_KEY}={sizes[0]}'].rstrip('.')}."
        )
    precision, compiles = profile.precision, profile.compiles
    candidates = [
        candidate_from_layout(layout, mesh, micro_batch_size=n, precision=precision, compiles=compiles)
        for n in possible_sizes
    ]
    _check_candidate(candidates[0], profile)
    return candidates


def _check_candidate(candidate: Candidate, profile: ModelProfile) -> None:
    """Raise LayoutError if the model does not support an axis or an option of the candidate."""
    for key in option_keys(candidate):
        if key in profile.refused:
            raise LayoutError(
                f"{candidate.layout} is not possible: {profile.refused[key].rstrip('.')}.", hint="another layout"
            )
    allowed_sizes = {"tp": profile.tp_sizes, "cp": profile.cp_sizes, "ep": profile.ep_sizes}
    for axis, sizes in allowed_sizes.items():
        size = getattr(candidate, axis)
        if size > 1 and size not in sizes:
            allowed = f"{axis} of {', '.join(map(str, sizes))}" if sizes else f"no {axis}"
            hint = f"--layout {axis}={sizes[-1]}" if sizes else "--layout fsdp"
            raise LayoutError(f"{axis}={size} is not possible: the model allows {allowed}.", hint=hint)
    if candidate.zero == 3 and profile.optimizer.whole_tensors:
        raise LayoutError(f"{candidate.layout}: {profile.optimizer.name} needs whole tensors.", hint="--layout zero1")
