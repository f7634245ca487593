"""The nodes that have only workers of parameter servers: the run goes on without one of them.

The servers are the first ranks of the run, so node 0 has them, or some of them. The weights are there, and no worker
has anything that another one could not compute.
"""

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import ExitCode, MachineError
from paceline.launch.agent.restart_policy import has_external_cause
from paceline.launch.failures.failure_record import LOST_NODE, Failure
from paceline.launch.several_nodes.attempt_progress import PartResult, read_progress
from paceline.launch.several_nodes.lost_nodes import LOST_NODES, LOST_WORK, LostNode

_OVERDUE_SECONDS = 10.0  # from the end of the servers to that of the workers; as on one machine


class WorkerNodes:
    """The losses of workers that a run survives. Without parameter servers, it survives none.

    `spare` decides whether an attempt goes on although the part of a node has ended in it.
    """

    def __init__(self, *, ranks_per_node: int) -> None:
        self.has_stopped = False
        """Whether the attempt is being ended, so that no loss matters any more."""
        self._ranks_per_node = ranks_per_node
        self._servers = 0
        self._folder = Path()
        self._spared: set[int] = set()
        self._losses: list[LostNode] = []  # of the current attempt
        self._return_steps: dict[int, int] = {}  # of losses whose node came again, by their position
        self._earlier_lines: list[str] = []  # about the losses of earlier attempts
        self._servers_end_time: float | None = None

    def begin_attempt(self, folder: Path, request: Mapping[str, Any]) -> None:
        """Begin an attempt, for which all nodes that are there get their parts."""
        self._earlier_lines = self.loss_lines()
        self._servers, self._folder = int(request.get("servers") or 0), folder
        self._spared, self._losses, self._return_steps = set(), [], {}
        self._servers_end_time, self.has_stopped = None, False

    @property
    def is_in_use(self) -> bool:
        """True if the current attempt has parameter servers."""
        return self._servers > 0

    def has_only_workers(self, node: int) -> bool:
        """Return whether a node has workers of parameter servers, and no server."""
        return bool(self._servers) and node * self._ranks_per_node >= self._servers

    def num_workers(self, nodes: Collection[int]) -> int:
        """Return the number of workers on node 0 and on these nodes."""
        return sum(self._num_workers_of(node) for node in {0, *nodes})

    def needed(self, lost_nodes: Sequence[int], *, present: Collection[int]) -> list[int]:
        """Return those of the lost nodes without which no attempt can start; `present` are the nodes that are there.

        A server is needed. Of the workers, one is enough.
        """
        if not self._servers:
            return list(lost_nodes)
        needed = [node for node in lost_nodes if not self.has_only_workers(node)]
        return needed if self.num_workers(present) else list(lost_nodes)

    def counts(self, node: int) -> bool:
        """Return whether the end of a node's part counts for the result of the attempt."""
        return node not in self._spared

    def spare(self, node: int, result: PartResult, *, name: str, running: Collection[int], silence: float) -> bool:
        """Return whether the attempt goes on although the part of a node has ended with this result.

        `running` are the other nodes whose parts have not ended, and `silence` is for how many seconds nothing has come
        from the node. If workers are lost, the screen and the first server hear of it.
        """
        if not self.has_only_workers(node) or self.has_stopped:
            return False
        if self._servers_end_time is None:
            failure = result.failure
            if failure is None or not _is_loss(failure) or not self.num_workers(running):
                return False
            self._record(node, failure, name=name, running=running, silence=silence)
        self._spared.add(node)
        return True

    def welcome(self, node: int) -> bool:
        """Return whether a node that takes the place of a lost one starts its part of the attempt now."""
        if node not in self._spared or self._servers_end_time is not None or self.has_stopped:
            return False
        self._spared.discard(node)
        position = max((place for place, loss in enumerate(self._losses) if loss.node == node), default=-1)
        self._return_steps[position] = self._servers_step()
        return True

    def watch_servers(self, own: PartResult, results: Mapping[int, PartResult]) -> bool:
        """Return whether workers still run long after the servers have ended well; they have nothing to do then."""
        num_nodes = -(-self._servers // self._ranks_per_node)
        ends = [own, *(results[node] for node in range(1, num_nodes) if node in results)]
        if not self._servers or len(ends) < num_nodes or any(_has_failed(end) for end in ends):
            return False
        self._servers_end_time = self._servers_end_time or time.monotonic()
        return time.monotonic() - self._servers_end_time > _OVERDUE_SECONDS

    def loss_lines(self) -> list[str]:
        """Return, for the end of the run, a line about each node that was lost."""
        works = LOST_WORK.read(self._folder) if self._losses else []
        ends = [f" to step {self._return_steps.get(i)}" * (i in self._return_steps) for i in range(len(self._losses))]
        lines = [
            f"went on without {loss.name} from step {loss.step}{end}: {loss.reason}"
            for loss, end in zip(self._losses, ends, strict=True)
        ]
        return [
            *self._earlier_lines,
            *(f"{line}; {work.describe()}" for line, work in zip(lines, works, strict=False)),
            *(f"{line}; what its workers were computing is not known" for line in lines[len(works) :]),
        ]

    def _servers_step(self) -> int:
        """Return the last step that the servers on node 0 have finished."""
        return read_progress(self._folder, range(min(self._servers, self._ranks_per_node))).last_step()

    def _num_workers_of(self, node: int) -> int:
        first = node * self._ranks_per_node
        return first + self._ranks_per_node - min(max(self._servers, first), first + self._ranks_per_node)

    def _record(self, node: int, failure: Failure, *, name: str, running: Collection[int], silence: float) -> None:
        step = self._servers_step()
        is_gone = failure.kind == LOST_NODE
        reason = failure.message.partition(" is gone: ")[2] if is_gone else failure.summary
        loss = LostNode(
            node=node, name=name, first_rank=node * self._ranks_per_node, num_ranks=self._ranks_per_node, reason=reason,
            step=step, silent_seconds=silence,
        )  # fmt: skip
        self._losses.append(loss)
        text = f"{name} {'is gone' if is_gone else 'has no workers any more'}: {reason}; last step {step}; "
        print_line(f"{text}the run continues with {plural(self.num_workers(running), 'worker')}", sys.stderr)
        with suppress(OSError):  # the server then finds out by itself, after `train.timeout_seconds`
            LOST_NODES.write(self._folder, self._losses)


def _is_loss(failure: Failure) -> bool:
    """Return whether workers can be lost in this way: with their node or their network, or killed again and again."""
    return has_external_cause(failure) or failure.kind == MachineError.__name__


def _has_failed(result: PartResult) -> bool:
    return result.failure is not None or result.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)
