"""Plan a parameter server: divide ranks into servers and workers, and refuse unsupported layouts and settings."""

from collections.abc import Iterator
from types import MappingProxyType

from typing_extensions import override

from paceline.config.layout import Layout, LayoutKind
from paceline.config.update_rule import UNBOUNDED, UpdateRule
from paceline.console.formatting import plural
from paceline.errors import LayoutError, PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.rule_planning import REASON_AGAINST_TOKEN_LIMIT, RulePlanning


def _servers_hold(servers: int) -> str:
    """Return the subject and the verb of `the first 2 ranks hold the parameters`, without `the first`."""
    return "rank holds" if servers == 1 else f"{servers} ranks hold"


class ParameterServerPlanning(RulePlanning):
    """The planning rules of `--update ps`."""

    refused_settings = MappingProxyType(
        {
            "device": "gradients are sent over gloo, which is tested on CPUs only",
            "exact": "the order of arrival is not recorded",
            "train.tokens": REASON_AGAINST_TOKEN_LIMIT,
            "log.statistics": "each gradient is that of a single share of a batch",
            "fp16": "the loss scale is not sent to workers",
            "sync_bn": "it synchronises statistics in the forward, but workers do not wait for each other",
            "compile": "it has not been tested with a parameter server",
            "workers": "a worker's next share is not known before it asks",
        }
    )

    @override
    def num_workers(self, update: UpdateRule, *, ranks: int, problems: list[PacelineError]) -> int:
        """Return the number of ranks that are not servers; if it is 0, add an error to `problems` and return 1."""
        workers = ranks - update.servers
        if workers < 1:
            problems.append(
                LayoutError(
                    f"--update {update} with {plural(ranks, 'rank')}: no worker is left.",
                    cause=f"the first {_servers_hold(update.servers)} the parameters, the others compute gradients",
                    hint=f"--ranks {update.servers + 2}, or with --nodes more nodes",
                )
            )
        return max(1, workers)

    @override
    def refuse_launcher(self, update: UpdateRule, *, launcher: str) -> list[PacelineError]:
        """Return an error, because another launcher cannot restart a single lost worker."""
        return [
            UsageError(
                f"--update ps under {launcher} is not supported yet.",
                cause="a lost worker is restarted alone, which that launcher does not do",
                hint="paceline train JOB --ranks 4 --update ps, without that launcher",
            )
        ]

    @override
    def refuse_nodes(self, update: UpdateRule, *, num_nodes: int, num_ranks: int) -> list[PacelineError]:
        """Return an error if the servers are not all on node 0 and do not fill whole nodes either.

        Otherwise the loss of a node with both servers and workers would end the run, although most of its ranks are
        workers.
        """
        servers, ranks_per_node = update.servers, num_ranks // num_nodes
        if servers <= ranks_per_node or servers % ranks_per_node == 0:
            return []
        num_server_nodes = -(-servers // ranks_per_node)
        return [
            LayoutError(
                f"--update {update} with {plural(ranks_per_node, 'rank')} on each node: "
                f"node {num_server_nodes - 1} would have servers and workers.",
                cause="the servers share node 0 with workers, or fill the first nodes",
                hint=f"--update ps,servers={num_server_nodes * ranks_per_node}, or --ranks-per-node {servers}",
            )
        ]

    @override
    def refuse_layout(self, update: UpdateRule, layout: Layout, mesh: Mesh) -> list[PacelineError]:
        """Return the errors of a layout in which a worker would not have the whole model."""
        errors: list[PacelineError] = []
        other_axes = [axis for axis in mesh.split_axes if axis != "dp_replicate"]
        ranks = mesh.ranks + update.servers
        if other_axes or layout.kind is LayoutKind.THREADS:
            errors.append(
                LayoutError(
                    f"--update ps needs ddp, not {layout}.",
                    cause="each worker computes the gradient of its share on a whole model",
                    hint=f"--layout ddp --ranks {ranks} --update {update}",
                )
            )
        return errors

    @override
    def notes(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterator[str]:
        """Yield the lines that describe the rule."""
        summary = f"update: ps, {plural(update.servers, 'server')}, {plural(mesh.replicas, 'worker')}"
        max_staleness = update.staleness
        if max_staleness == 0:
            yield f"{summary}; the shares of a batch form one update, as in ddp"
            return
        staleness_text = str(update).rpartition("=")[2]
        lateness = (
            "any number of updates late"
            if staleness_text == UNBOUNDED
            else f"at most {plural(int(max_staleness), 'update')} late"
        )
        yield f"{summary}; each share of a batch is a separate update, {lateness}"
        if max_staleness + 1 < mesh.replicas:
            yield (
                f"note: {int(max_staleness) + 1} of {mesh.replicas} workers compute at a time: another gradient in "
                f"flight would be more than {plural(int(max_staleness), 'update')} late"
            )
