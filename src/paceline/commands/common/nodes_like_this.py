"""The machines of `plan --nodes`: several that are like this one, with a given or measured link between them."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.commands.common.resume_command import build_resume_command
from paceline.config.task import Task
from paceline.errors import PacelineError, UsageError, list_problems, raise_all
from paceline.planner.hardware.cluster import Cluster, Link
from paceline.planner.hardware.given_link import EXAMPLE, GivenLink, read_given_link
from paceline.profiling.machine_benchmarks.this_machine import benchmark_local_machine

_EXAMPLE_HEAD = "host1"


@dataclass(frozen=True, kw_only=True)
class NodesLikeThis:
    """The requested machines. `ranks_per_node` is None if each has as many ranks as this machine would have alone."""

    num_nodes: int
    ranks_per_node: int | None
    link: Link
    head: str = ""
    """Where the nodes meet, as a part of `--nodes`; empty if it is unknown."""

    @property
    def placeholder_text(self) -> str:
        """The words that say what the example of a head in `train_command` stands for; empty if the head is known."""
        return "" if self.head else f", with the name of the first machine for {_EXAMPLE_HEAD}"

    def measure(self, *, ranks_per_node: int, device: str) -> Cluster:
        """Return the machines as a cluster, after the benchmark of this one.

        Raises:
            MachineError: the benchmark failed.
        """
        local = benchmark_local_machine(ranks=ranks_per_node, device=device).cluster
        return replace(local, nodes=self.num_nodes, between=self.link)

    def train_command(self, task: Task, row: Mapping[str, Any]) -> str:
        """Return what to type to train in a layout of the plan. `task` was planned, with the ranks of one machine."""
        training = replace(
            task,
            run=f"runs/{task.short_job}-on-{self.num_nodes}-nodes",
            ranks=self.num_nodes * task.ranks,
            nodes=f"{self.num_nodes}:{self.head or _EXAMPLE_HEAD}",
            layout=row["layout"],
            settings={**task.settings, **row["settings"]},
            origins={**task.origins, **dict.fromkeys(row["settings"], "auto")},
        )
        return build_resume_command(training)


def read_nodes_like_this(
    *, nodes: int | None, ranks_per_node: int | None, link: str | None, ranks: int | None, cluster: str
) -> NodesLikeThis | None:
    """Return the machines of the options `--nodes`, `--ranks-per-node` and `--link`; None if none of them is given.

    Without `nodes`, the number is that of the nodes that measured the link, if `link` is a file of theirs.

    Raises:
        UsageError, Problems: an option is missing, invalid, or contradicts `--cluster` or `--ranks`.
        MachineError: by the file of `--link`, the link does not work.
    """
    if nodes is None and ranks_per_node is None and link is None:
        return None
    problems: list[PacelineError] = []
    found: GivenLink | None = None
    if link is not None:
        try:
            found = read_given_link(link)
        except PacelineError as error:
            problems += list_problems(error)
    nodes = found.num_nodes if nodes is None and found is not None else nodes
    if nodes is None and not problems:
        name = "--link" if ranks_per_node is None else "--ranks-per-node"
        problems.append(UsageError(f"{name} needs --nodes.", hint=_example(2, ranks_per_node, link)))
    elif nodes is not None and nodes <= 1:
        problems.append(UsageError(f"--nodes {nodes}: a link needs two machines.", hint="--ranks N for this machine"))
    if ranks_per_node is not None and ranks_per_node < 1:
        what = f"--ranks-per-node {ranks_per_node}: a machine needs at least one rank."
        problems.append(UsageError(what, hint="--ranks-per-node 2"))
    if cluster.strip() != "here":
        cause = "--nodes stands for machines like this one, and --cluster for others"
        hint = "one of them; a cluster names its own link: 4x8xA100-80G@eth-100g"
        problems.append(UsageError(f"--nodes and --cluster {cluster} contradict each other.", cause=cause, hint=hint))
    if ranks is not None:
        cause = "--ranks is the number of processes on this machine alone"
        hint = _example(nodes or 2, ranks_per_node or ranks, link)
        problems.append(UsageError("--nodes and --ranks contradict each other.", cause=cause, hint=hint))
    if link is None and nodes is not None:
        cause = "only a measurement, or you, can say how fast it is"
        problems.append(UsageError("--nodes needs the link between the machines.", cause=cause, hint=EXAMPLE))
    raise_all(problems)
    assert nodes is not None and found is not None
    return NodesLikeThis(num_nodes=nodes, ranks_per_node=ranks_per_node, link=found.link, head=found.head)


def _example(nodes: int, ranks_per_node: int | None, link: str | None) -> str:
    return f"--nodes {nodes} --ranks-per-node {ranks_per_node or 1} --link {shlex.quote(link or '10Gbit/s')}"
