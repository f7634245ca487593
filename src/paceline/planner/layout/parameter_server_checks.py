"""The parameter server: how ranks are divided into servers and workers, and what it can be combined with."""

from collections.abc import Iterator

from paceline.config.layout import Layout
from paceline.config.layout import LayoutKind as LayoutKind
from paceline.config.update_rule import UNBOUNDED, UpdateRule
from paceline.console.formatting import plural
from paceline.errors import LayoutError, PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh


def workers_of(update: UpdateRule, *, ranks: int, problems: list[PacelineError]) -> int:
    """Return the number of ranks that compute gradients; an impossible split is added to `problems`."""
    if not update.has_servers:
        return ranks
    workers = ranks - update.servers
    if workers < 1:
        problems.append(
            LayoutError(
                f"--update {update} with {plural(ranks, 'rank')}: no worker is left.",
                cause=f"the first {_first(update.servers)} the parameters, the others compute gradients",
                hint=f"--ranks {update.servers + 2}",
            )
        )
    return max(1, workers)


def _first(servers: int) -> str:
    return "rank holds" if servers == 1 else f"{servers} ranks hold"


def refuse_joined(update: UpdateRule, *, kind: str | None) -> list[PacelineError]:
    """Return an error under another launcher, which has no way to restart a lost worker."""
    if not update.has_servers or kind is None:
        return []
    return [
        UsageError(
            f"--update ps under {kind} is not supported yet.",
            cause="a lost worker is restarted alone, which that launcher does not do",
            hint="paceline train JOB --ranks 4 --update ps, without that launcher",
        )
    ]


def refuse_server(update: UpdateRule, layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """Return the errors of a layout in which a worker would not have the whole model."""
    if not update.has_servers:
        return []
    found: list[PacelineError] = []
    others = [axis for axis in mesh.split if axis != "dp_replicate"]
    ranks = mesh.ranks + update.servers
    if others or layout.kind is LayoutKind.THREADS:
        found.append(
            LayoutError(
                f"--update ps needs ddp, not {layout}.",
                cause="each worker computes the gradient of its share on a whole model",
                hint=f"--layout ddp --ranks {ranks} --update {update}",
            )
        )
    return found


def server_notes(update: UpdateRule, mesh: Mesh) -> Iterator[str]:
    """Yield the banner lines on the parameter server."""
    if not update.has_servers:
        return
    who = f"update: ps, {plural(update.servers, 'server')}, {plural(mesh.replicas, 'worker')}"
    bound = update.staleness
    if bound == 0:
        yield f"{who}; the shares of a batch form one update, as in ddp"
        return
    known = str(update).rpartition("=")[2]
    late = "any number of updates late" if known == UNBOUNDED else f"at most {plural(int(bound), 'update')} late"
    yield f"{who}; each share of a batch is a separate update, {late}"
    if bound + 1 < mesh.replicas:
        yield (
            f"note: {int(bound) + 1} of {mesh.replicas} workers compute at a time: another gradient in flight would "
            f"be more than {plural(int(bound), 'update')} late"
        )
