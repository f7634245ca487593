"""Plan a pipeline: build its program, check its schedule, and describe its stages and its bubble."""

from pathlib import Path

from paceline.config.axis_counts import MAX_RANKS
from paceline.config.layout import Layout
from paceline.console.formatting import plural
from paceline.errors import LayoutError, PacelineError
from paceline.planner.layout.mesh import Mesh
from paceline.schedule.program import Program
from paceline.schedule.program_simulation import simulate
from paceline.schedule.registry import build
from paceline.schedule.text_format import read

_LARGE_BUBBLE = 0.3  # the fraction of idle time from which a note suggests smaller microbatches


def is_schedule_file(schedule: str) -> bool:
    """Return True if the value is the path of a schedule file, not the name of a schedule."""
    return "/" in schedule or "." in schedule


def build_pipeline_program(layout: Layout, mesh: Mesh, *, num_micro: int) -> Program:
    """Return the program of the layout's schedule for the `num_micro` microbatches of one replica.

    Raises:
        LayoutError, UsageError: the schedule does not exist, or does not fit the mesh or the microbatches.
    """
    if not is_schedule_file(layout.schedule):
        return build(layout.schedule, ranks=mesh.pp, micro=num_micro, virtual=layout.virtual)
    program = _read_schedule_file(layout, mesh)
    if program.num_micro != num_micro:
        raise LayoutError(
            f"the schedule {layout.schedule} is for {plural(program.num_micro, 'microbatch')}, "
            f"but each replica of this run has {num_micro}.",
            cause="a custom schedule is for a fixed number of microbatches; a short last batch has fewer",
            hint=f"a --train.micro_batch_size that gives {plural(program.num_micro, 'microbatch')} per replica, with "
            "--data.drop_last true; or a schedule by name",
        )
    return program


def refuse_schedule(layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """Return the errors of a layout's pipeline schedule, for any number of microbatches."""
    if mesh.pp == 1:
        return []
    try:
        if is_schedule_file(layout.schedule):
            _read_schedule_file(layout, mesh)
        else:
            _check_size(layout, mesh)
            build(layout.schedule, ranks=mesh.pp, micro=1, virtual=layout.virtual)
    except PacelineError as error:
        return [error]
    return []


def _check_size(layout: Layout, mesh: Mesh) -> None:
    """Raise LayoutError if the pipeline has more than MAX_RANKS stages."""
    stages = mesh.pp * (layout.virtual or 1)
    if stages > MAX_RANKS:
        raise LayoutError(
            f"pp={mesh.pp} × virtual={layout.virtual} is {stages:,} stages, more than {MAX_RANKS:,}.",
            cause="one digit too many",
            hint="--layout pp=2,schedule=interleaved,virtual=2",
        )


def _read_schedule_file(layout: Layout, mesh: Mesh) -> Program:
    """Return the program in the user's schedule file; raise LayoutError if the file or its number of ranks is wrong."""
    if not Path(layout.schedule).is_file():
        raise LayoutError(
            f"there is no schedule file {layout.schedule}.",
            cause=f"looked for in {Path.cwd()}",
            hint=f"--layout pp={mesh.pp},schedule=1f1b, or a file's path",
        )
    program = read(layout.schedule)
    if program.num_ranks != mesh.pp:
        raise LayoutError(
            f"the schedule {layout.schedule} is for {plural(program.num_ranks, 'rank')}, but this "
            f"layout has pp={mesh.pp}.",
            cause="a schedule has exactly one line per pipeline rank",
            hint=f"--layout pp={program.num_ranks},schedule={layout.schedule}",
        )
    return program


def pipeline_notes(layout: Layout, mesh: Mesh, *, num_micro: int, micro_batch_size: int) -> tuple[str, ...]:
    """Return the banner lines on stages, microbatches and the bubble. The bubble is simulated with equal stages."""
    if mesh.pp == 1:
        return ()
    micro_per_replica = -(-num_micro // mesh.replicas)
    program = build_pipeline_program(layout, mesh, num_micro=micro_per_replica)
    bubble = simulate(program).bubble
    text = (
        f"pipeline: {program.name}, {plural(program.num_stages, 'stage')} on {mesh.pp} ranks, "
        f"{plural(micro_per_replica, 'microbatch')} per replica, each rank idle {bubble:.0%} of the time (the "
        "bubble, of equal stages)"
    )
    if bubble < _LARGE_BUBBLE or micro_batch_size == 1:
        return (text,)
    smaller_size = max(1, micro_batch_size // 4)
    return (
        text,
        f"warning: few microbatches for {plural(program.num_stages, 'stage')}; "
        f"--train.micro_batch_size {smaller_size} would reduce the idle time",
    )
