"""The conflicts of a layout with the number of ranks and the settings, and the numbers of ranks that a run may have."""

from paceline.config.layout import Layout, parse_layout
from paceline.config.merge_settings import COMMAND_LINE, RequestedSettings
from paceline.config.settings import Settings
from paceline.config.task import Task
from paceline.config.update_rule import UpdateRule, parse_update
from paceline.console.formatting import plural
from paceline.errors import PacelineError, UsageError
from paceline.nodes.node_place import NodePlace
from paceline.planner.layout.layout_checks import check_layout_settings, refuse_unused_place_settings
from paceline.planner.layout.mesh import resolve_mesh
from paceline.planner.layout.pipeline_options import refuse_schedule
from paceline.planner.layout.update_rule_checks import check_update_settings, rule_planning


def layout_problems(
    verb: str, layout: Layout, update: UpdateRule, ranks: int, settings: Settings | None, requested: RequestedSettings
) -> list[PacelineError]:
    """Return errors for conflicts of layout, ranks and settings.

    A setting from the command line that the layout does not use is an error too, except in `compare`, which passes the
    same settings to all layouts.
    """
    problems: list[PacelineError] = []
    rule = rule_planning(update)
    workers = rule.num_workers(update, ranks=ranks, problems=problems)
    mesh = resolve_mesh(layout, ranks=workers, problems=problems, update=update)
    problems += [*refuse_schedule(layout, mesh), *rule.refuse_layout(update, layout, mesh)]
    if settings is not None:
        typed_settings = [
            name for name, origin in requested.origins.items() if origin == COMMAND_LINE and verb != "compare"
        ]
        problems += [*check_layout_settings(layout, mesh, settings), *check_update_settings(update, settings)]
        problems += refuse_unused_place_settings(layout, mesh, settings, requested=typed_settings)
    return problems


def fewer_rank_counts(task: Task, settings: Settings) -> tuple[int, ...]:
    """Return the numbers of ranks with which the run may continue if a rank is lost, the largest first.

    Raises:
        UsageError: `survive.min_ranks` is set, and no smaller number is possible.
    """
    minimum = settings.survive.min_ranks
    if minimum is None or task.verb != "train":
        return ()
    hint = f"--ranks {max(1, task.ranks // 2)}:{task.ranks}"
    if minimum >= task.ranks:
        raise UsageError(f"survive.min_ranks is {minimum}, but the run has {plural(task.ranks, 'rank')}.", hint=hint)
    candidates = range(task.ranks - 1, minimum - 1, -1)
    return _fitting_counts(task, settings, candidates, option="survive.min_ranks", hint="leave survive.min_ranks out")


def node_counts(task: Task, place: NodePlace, settings: Settings) -> tuple[int, ...]:
    """Return the numbers of nodes with which the run may train, the largest first.

    Raises:
        UsageError: the number of nodes may change, and no smaller number is possible.
    """
    if not place.is_elastic:
        return (place.num_nodes,)
    ranks_per_node = task.ranks // place.num_nodes
    candidates = range((place.num_nodes - 1) * ranks_per_node, place.min_nodes * ranks_per_node - 1, -ranks_per_node)
    hint = place.option.partition(":")[2]
    fewer = _fitting_counts(task, settings, candidates, option=f"--nodes {place.option}", hint=f"--nodes {hint}")
    return (place.num_nodes, *(ranks // ranks_per_node for ranks in fewer))


def _fitting_counts(task: Task, settings: Settings, candidates: range, *, option: str, hint: str) -> tuple[int, ...]:
    """Return the numbers of ranks that fit the layout. `hint` is what to type to train with all ranks only.

    Raises:
        UsageError: none fits, or the update rule or the layout needs all ranks.
    """
    layout, update = parse_layout(task.layout), parse_update(task.update)
    requested = RequestedSettings(values=task.settings, origins=task.origins)
    if not update.is_synchronous or layout.processes(ranks=task.ranks) != task.ranks:
        raise UsageError(
            f"a run with --update {update} and --layout {layout} can't continue with fewer ranks.", hint=hint
        )
    counts = [
        ranks for ranks in candidates if not layout_problems(task.verb, layout, update, ranks, settings, requested)
    ]
    if not counts:
        raise UsageError(
            f"--layout {layout} fits no smaller number of ranks down to {candidates[-1]}.",
            where=option,
            hint=f"a layout in which one size follows from the number of ranks, such as pp=2,dp_shard=-1; or {hint}",
        )
    return tuple(counts)
