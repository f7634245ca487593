"""The other nodes of a run as the head's agent sees them: it starts their parts of an attempt, and watches them."""

import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from paceline.config.settings import Nodes
from paceline.console.output import print_line
from paceline.errors import ExitCode
from paceline.launch.failures.failure_record import LOST_NODE, Failure
from paceline.launch.failures.first_failure import exit_code, first_failure
from paceline.launch.rendezvous import reserve_port
from paceline.launch.several_nodes.attempt_part import AttemptPart
from paceline.launch.several_nodes.attempt_progress import AttemptProgress, PartResult, join_progress
from paceline.launch.several_nodes.node_messages import EndNode, EndPart, NodeLeft, PartEnded, StartPart, as_message
from paceline.launch.several_nodes.worker_nodes import WorkerNodes
from paceline.nodes.node_link import NodeLink
from paceline.run_folder.run_folder import RunFolder

SILENCE_WARNING_SECONDS = 10.0
_POLL_SECONDS = 0.02
_END_SECONDS = 90.0  # from the order to end a part to its end; an agent may wait twice for 30 s for its processes


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node other than the head."""

    host: str
    link: NodeLink


class LatePlaces(Protocol):
    """The places of lost nodes that others may take while the run goes on; `LateNodes` has them."""

    def open_place(self, node: int) -> bool:
        """Free the place of a lost node. Return False if no further node may come late."""

    def take(self) -> dict[int, Member]:
        """Return the nodes that have been admitted since the last call."""

    def wait(self, *, seconds: float, is_stopped: Callable[[], bool]) -> dict[int, Member]:
        """Wait until a node has been admitted, and return the new ones; none if none comes within `seconds`."""

    def close(self) -> None:
        """Admit no further node."""


class NodeGroup:
    """The nodes of a run. The head is node 0, and each node has `ranks_per_node` ranks, in the order of the nodes.

    `gather(lost, is_stopped)` waits for nodes that take the places of lost ones, unless `is_stopped()` becomes true. It
    returns the new members, perhaps more than were lost until now, and, if some did not come, why. `late` has the
    places of lost nodes without which the run goes on; None if nobody may take them.
    """

    def __init__(
        self,
        members: Mapping[int, Member],
        *,
        own_host: str,
        own_address: str,
        ranks_per_node: int,
        settings: Nodes,
        gather: Callable[[Sequence[int], Callable[[], bool]], tuple[Mapping[int, Member], str]],
        late: LatePlaces | None = None,
    ) -> None:
        self.settings = settings
        self._members = dict(members)
        self._hosts = {0: own_host, **{node: member.host for node, member in members.items()}}
        self._own_address = own_address
        self._ranks_per_node = ranks_per_node
        self._gather = gather
        self._late = late
        self._workers = WorkerNodes(ranks_per_node=ranks_per_node)
        self._start: StartPart | None = None  # of the current attempt, as node 0 would get it
        self._attempt = 0
        self._reservation: socket.socket | None = None  # of the port on which rank 0 listens
        self._results: dict[int, PartResult] = {}  # of the current attempt
        self._lost: list[int] = []
        self._has_unfinished_loss = False  # whether a node was lost before it ended its part of this attempt
        self._farewells: dict[int, str] = {}  # why nodes left, by their own words
        self._silent: set[int] = set()  # nodes of whose silence the screen says something

    @property
    def num_nodes(self) -> int:
        """The number of nodes, with the head."""
        return len(self._hosts)

    @property
    def loss_lines(self) -> list[str]:
        """A line about each node without which the run went on."""
        return self._workers.loss_lines()

    def start_attempt(
        self, run: RunFolder, attempt: int, request: Mapping[str, Any], *, exact: bool
    ) -> tuple[AttemptPart, Path]:
        """Have all members run their parts of an attempt. Return the part of this node, and the path of its request.

        Raises:
            MachineError: the address of this node is gone.
            UsageError: the folder of the attempt can't be written.
        """
        self._attempt, self._results, self._has_unfinished_loss = attempt, {}, False
        if self._reservation is not None:
            self._reservation.close()
        self._reservation = reserve_port(self._own_address)  # until the next attempt
        port = int(self._reservation.getsockname()[1])
        part = AttemptPart(ranks=self._ranks(0), address=self._own_address, port=port, own_address=self._own_address)
        path = part.write_request(run, attempt, request)  # before the members look for the folder
        self._workers.begin_attempt(path.parent, request)
        self._start = StartPart(
            attempt=attempt, first_rank=0, address=self._own_address, port=port, exact=exact, request=dict(request)
        )
        for node in self._members:
            self._start_part(node, self._start)
        return part, path

    def _start_part(self, node: int, start: StartPart) -> None:
        start = msgspec.structs.replace(start, first_rank=self._ranks(node).start)
        self._members[node].link.send(as_message(start))

    def has_failed(self) -> bool:
        """Read what the members say, and return whether the attempt has failed on one of them, or one is lost."""
        for node, member in list(self._members.items()):
            is_over = bool(member.link.loss)  # before the messages that arrived until then
            while (message := member.link.next_message()) is not None:
                self._record(node, message)
            if is_over or not member.link.loss:
                self._watch_silence(node, member)
        self._welcome_late()
        codes = {result.exit_code for node, result in self._results.items() if self._workers.counts(node)}
        return bool(codes - {int(ExitCode.DONE), int(ExitCode.STOPPED)}) or self._has_unfinished_loss

    def finish_attempt(self, own: PartResult, *, is_abandoned: Callable[[], bool]) -> PartResult:
        """Wait until all parts have ended, and return the result of the attempt.

        If this node's part has failed, the others are ended. With `is_abandoned`, they are not waited for.
        """
        deadline: float | None = None
        is_failed = own.failure is not None or own.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)
        while self._running_nodes() and not is_abandoned():
            is_failed = self.has_failed() or is_failed
            self._workers.has_stopped = is_failed
            if (is_failed or self._workers.watch_servers(own, self._results)) and deadline is None:
                self._send_all(EndPart(attempt=self._attempt))
                deadline = time.monotonic() + _END_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                for node in self._running_nodes():
                    self._lose(node, f"its ranks did not end within {_END_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        self._workers.has_stopped = True
        return self._join(own)

    def replace_lost(self, *, is_stopped: Callable[[], bool]) -> str:
        """Wait for nodes that take the places of lost ones. Return why the run can't go on, or "" if it can."""
        while True:
            for node, member in list(self._members.items()):  # a second one may be lost during the wait for the first
                self._watch_silence(node, member)
            self._welcome_late()
            needed = self._workers.needed(self._lost, present=self._members)
            if not needed:
                return ""
            if not self.settings.restarts:  # another failure came first, and is to be restarted
                return f"{self._describe(needed[0])} is gone, too (nodes.restarts is 0)."
            came, problem = self._await_needed(needed, is_stopped)
            self._seat(came)
            if problem:
                return problem

    def _await_needed(self, needed: list[int], is_stopped: Callable[[], bool]) -> tuple[Mapping[int, Member], str]:
        """Return the nodes that take the places of lost ones and, if there are too few of them, why."""
        if self._late is None or not all(map(self._workers.has_only_workers, needed)):
            if self._late is not None:
                self._late.close()
            return self._gather(sorted(self._lost), is_stopped)
        came = self._late.wait(seconds=self.settings.wait, is_stopped=is_stopped)  # one is enough
        return came, "" if came else f"no node came within {self.settings.wait:.0f} s."

    def _seat(self, came: Mapping[int, Member]) -> None:
        for node, member in came.items():
            self._members[node], self._hosts[node] = member, member.host
        self._lost = [node for node in self._lost if node not in came]

    def _welcome_late(self) -> None:
        """Seat the nodes that have come late, and have them start their parts of an attempt that goes on."""
        came = {} if self._late is None else self._late.take()
        self._seat(came)
        for node in came:
            if self._start is not None and self._workers.welcome(node):
                del self._results[node]
                print_line(f"{self._describe(node)} takes the place of the lost one", sys.stderr)
                again = {**self._start.request, "start_number": 2}
                self._start_part(node, msgspec.structs.replace(self._start, request=again))

    def end(self, code: int, text: str) -> None:
        """End all members with the exit code of the run."""
        if self._late is not None:
            self._late.close()
        for node, member in self._members.items():
            member.link.send(as_message(EndNode(node=node, exit_code=code, text=text)))
            member.link.close()
        self._members.clear()
        if self._reservation is not None:
            self._reservation.close()

    def _ranks(self, node: int) -> range:
        return range(node * self._ranks_per_node, (node + 1) * self._ranks_per_node)

    def _running_nodes(self) -> list[int]:
        return [node for node in self._members if node not in self._results]

    def _send_all(self, message: msgspec.Struct) -> None:
        for member in self._members.values():
            member.link.send(as_message(message))

    def _record(self, node: int, message: Any) -> None:
        """Record the end of a member's part, or why it leaves. Ends of earlier attempts are left out."""
        with suppress(msgspec.ValidationError, TypeError):
            ended = msgspec.convert(message, PartEnded | NodeLeft)
            if isinstance(ended, NodeLeft):
                self._farewells[node] = ended.reason
            elif ended.attempt == self._attempt:
                failure = ended.read_failure(host=self._hosts[node])
                result = PartResult(exit_code=ended.exit_code, failure=failure, progress=ended.progress)
                self._record_end(node, result, silence=0.0)

    def _record_end(self, node: int, result: PartResult, *, silence: float) -> bool:
        """Record the end of a node's part. Return whether the attempt goes on without it."""
        running = [other for other in self._running_nodes() if other != node]
        self._results[node] = result
        return self._workers.spare(node, result, name=self._describe(node), running=running, silence=silence)

    def _watch_silence(self, node: int, member: Member) -> None:
        """Say that a node is silent, or count it as lost."""
        seconds, patience = member.link.silence_seconds, self.settings.patience
        if member.link.loss:
            self._lose(node, self._farewells.pop(node, "its agent has ended, or the connection to it was lost"))
        elif seconds > patience:
            text = f"node 0 has given this node up: nothing came from it for {seconds:.0f} s"
            end = EndNode(node=node, exit_code=int(ExitCode.STOPPED), text=text, may_return=True)
            member.link.send(as_message(end))
            self._lose(node, f"nothing for {seconds:.0f} s")
        elif seconds > min(SILENCE_WARNING_SECONDS, patience / 2):
            if node not in self._silent:
                text = f"nothing for {seconds:.0f} s; it counts as gone after {patience:.0f} s (nodes.patience)"
                print_line(f"{self._describe(node)}: {text}", sys.stderr)
            self._silent.add(node)
        elif node in self._silent and seconds < 1.0:
            self._silent.discard(node)
            print_line(f"{self._describe(node)} is there again", sys.stderr)

    def _lose(self, node: int, reason: str) -> None:
        """Count a node as lost, which is a failure of the attempt unless the node had ended its part."""
        member = self._members.pop(node)
        silence = member.link.silence_seconds
        member.link.close()
        self._silent.discard(node)
        self._lost.append(node)
        is_open = self._late is not None and self._workers.has_only_workers(node) and self._late.open_place(node)
        if node in self._results:
            return
        message = f"{self._describe(node)} is gone: {reason}"
        result = PartResult(
            exit_code=int(ExitCode.STOPPED),
            failure=Failure(
                rank=self._ranks(node).start,
                kind=LOST_NODE,
                message=message,
                screen=message,
                exit_code=int(ExitCode.STOPPED),
                monotonic_ns=time.monotonic_ns() - int(silence * 1e9),
                host=self._hosts[node],
            ),
            progress=AttemptProgress(),
        )
        if not self._record_end(node, result, silence=silence):
            self._has_unfinished_loss = True
        elif is_open:
            print_line(f"node {node} may come again, or another one instead: the same command there", sys.stderr)

    def _describe(self, node: int) -> str:
        ranks = describe_ranks(node, ranks_per_node=self._ranks_per_node)
        return f"node {node} ({self._hosts[node]}, {ranks})"

    def _join(self, own: PartResult) -> PartResult:
        """Return the result of the attempt from those of its parts."""
        own_failure = own.failure
        if own_failure is not None and own_failure.rank >= 0 and not own_failure.is_joint:
            own_failure = replace(own_failure, host=self._hosts[0])
        results = [result for node, result in self._results.items() if self._workers.counts(node)]
        parts = [own, *results]
        failures = [own_failure, *(result.failure for result in results)]
        progress = join_progress(part.progress for part in parts)
        first = first_failure([failure for failure in failures if failure is not None])
        if first is not None and first.kind == LOST_NODE:
            first = replace(first, step=progress.step, message=f"{first.message}; last step {progress.step}")
        code = exit_code({number: part.exit_code for number, part in enumerate(parts)}, first)
        return PartResult(exit_code=code, failure=first, progress=progress)


def describe_ranks(node: int, *, ranks_per_node: int) -> str:
    """Return the ranks of a node, such as "ranks 8-15"."""
    first = node * ranks_per_node
    return f"rank {first}" if ranks_per_node == 1 else f"ranks {first}-{first + ranks_per_node - 1}"
