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
from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import ExitCode
from paceline.launch.failures.failure_record import LOST_NODE
from paceline.launch.failures.first_failure import exit_code, first_failure
from paceline.launch.failures.rank_position import RankPosition, write_remote_positions
from paceline.launch.rendezvous import reserve_port
from paceline.launch.several_nodes.attempt_part import AttemptPart
from paceline.launch.several_nodes.attempt_progress import AttemptProgress, PartResult, join_progress
from paceline.launch.several_nodes.broken_links import BrokenLinks
from paceline.launch.several_nodes.member_losses import MemberLosses, lost_node_failure
from paceline.launch.several_nodes.node_counts import NodeCounts
from paceline.launch.several_nodes.node_messages import (
    EndNode,
    EndPart,
    NodeLeaves,
    NodeLeft,
    PartEnded,
    RankPositions,
    StartPart,
    as_message,
)
from paceline.launch.several_nodes.node_stays import NodeNames, NodeStay, NodeStays, describe_ranks
from paceline.launch.several_nodes.peer_checkpoint_search import PeerCheckpointSearch
from paceline.launch.several_nodes.worker_nodes import WorkerNodes
from paceline.nodes.finding import format_nodes
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.node_link import NodeLink, SilenceWatch
from paceline.run_folder.run_folder import RunFolder

_POLL_SECONDS = 0.02
_FIRST_REPORT_SECONDS, _MAX_REPORT_SECONDS = 5.0, 60.0
_POSITIONS_SECONDS = 1.5  # a member with a silent rank says four times a second what its ranks do
_LOOPBACK = "127.0.0.1"
_END_SECONDS = 90.0  # from the order to end a part to its end; an agent may wait twice for 30 s for its processes


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node other than the head."""

    host: str
    link: NodeLink


class Admission(Protocol):
    """The admission of nodes that come while the run lasts, to free places."""

    def take(self) -> Mapping[int, Member]:
        """Return the nodes that were admitted since the last call, by their number."""

    def vacate(self, channel: LineChannel) -> None:
        """Free the place of the node with this channel."""

    def close(self, exit_code: int, text: str) -> None:
        """Admit no more nodes, and end those that wait; those that were admitted before can still be taken."""


class NodeGroup:
    """The nodes of a run. The head is node 0, and each node has `ranks_per_node` ranks, in the order of the nodes.

    `counts` has the numbers of nodes with which the run may train; `node_counts` lists them, the largest first. An
    attempt runs on the first nodes that are there, and the others wait. The head keeps `interface_address` for rank 0,
    or, if it is empty, the address that the members reach. The group waits for another node up to `max_restarts` times.
    `memory` is the one of the nodes for checkpoints.
    """

    def __init__(
        self,
        members: Mapping[int, Member],
        *,
        own_host: str,
        interface_address: str,
        ranks_per_node: int,
        node_counts: Sequence[int],
        settings: Nodes,
        max_restarts: int,
        admission: Admission,
    ) -> None:
        self.settings = settings
        self.max_restarts = max_restarts
        self.ranks_per_node = ranks_per_node
        self._members = dict(members)
        self._names = NodeNames(own_host, interface_address)
        for node, member in members.items():
            self._names.add(node, member.host, member.link.channel)
        self._interface_address = interface_address
        self.counts = NodeCounts(node_counts)
        self._admission = admission
        self._workers = WorkerNodes(ranks_per_node=ranks_per_node)
        self.memory = PeerCheckpointSearch()
        self._broken_links = BrokenLinks()
        self._losses = MemberLosses(patience=settings.patience, names=self._names)
        self._stays = NodeStays()
        self._start: StartPart | None = None  # of the current attempt, as node 0 would get it
        self._attempt, self._last_step = 0, 0
        self._folder: Path | None = None  # of the current attempt
        self._reservation: socket.socket | None = None  # of the port on which rank 0 listens
        self._results: dict[int, PartResult] = {}  # of the current attempt
        self._positions: dict[int, tuple[float, tuple[RankPosition, ...]]] = {}  # with the time of their arrival
        self._leaving: set[int] = set()  # nodes that were asked to stop while the others continue
        self._lost: list[int] = []  # nodes in whose places others may come before the next attempt
        self._has_unfinished_loss = False  # whether a node was lost before it ended its part of this attempt
        self._farewells: dict[int, str] = {}  # why nodes left, by their own words
        self._silences: dict[int, SilenceWatch] = {}
        self._active = self._choose_nodes()  # the nodes of the current attempt, the head first

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the current attempt, with the head."""
        return len(self._active)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the current attempt."""
        return len(self._active) * self.ranks_per_node

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
        self._positions.clear()
        self._broken_links.clear()
        self._losses.clear()
        self._folder = run.attempt_folder(attempt)
        if self._reservation is not None:
            self._reservation.close()
        address = self._own_address()
        self._reservation = reserve_port(address)  # until the next attempt
        port = int(self._reservation.getsockname()[1])
        plan = self.memory.plan(self._active, checkpoints=run.checkpoints, request=request)
        request = {**request, "payload": {**request["payload"], "peer_plan": plan and plan.as_json()}}
        folder = self.memory.own.begin_attempt(node=0, host=address, plan=plan)
        part = AttemptPart(ranks=self._ranks(0), address=address, port=port, own_address=address, memory_folder=folder)
        path = part.write_request(run, attempt, request)  # before the members look for the folder
        self.memory.own.announce(path.parent, node=0)
        self._workers.begin_attempt(path.parent, request)
        self._stays.begin_attempt(run.path, attempt, map(self._new_stay, self._active))
        self._start = StartPart(
            attempt=attempt, first_rank=0, address=address, port=port, exact=exact, request=dict(request)
        )
        for node in self._running_nodes():
            self._start_part(node, self._start)
        return part, path

    def _start_part(self, node: int, start: StartPart) -> None:
        start = msgspec.structs.replace(start, first_rank=self._ranks(node).start)
        self._members[node].link.send(as_message(start))

    def _own_address(self) -> str:
        """Return the address at which rank 0 listens."""
        links = [self._members[node].link for node in self._active if node in self._members]
        return self._interface_address or (links[0].own_address if links else _LOOPBACK)

    def has_failed(self) -> bool:
        """Read what the members say, and return whether the attempt has failed on one of them, or one is lost."""
        self._read_messages()
        if self._workers.is_in_use:
            self._take_newcomers()  # they start their parts at once
        codes = {result.exit_code for node, result in self._results.items() if self._workers.counts(node)}
        return bool(codes - {int(ExitCode.DONE), int(ExitCode.STOPPED)}) or self._has_unfinished_loss

    def _read_messages(self) -> None:
        """Read what the members say, and find out which of them are lost."""
        for node, member in list(self._members.items()):
            is_over = bool(member.link.loss)  # before the messages that arrived until then
            while node in self._members and (message := member.link.next_message()) is not None:
                self._record(node, message)
            if node in self._members and (is_over or not member.link.loss):
                self._watch_silence(node, member)

    def silent_positions(self) -> list[RankPosition] | None:
        """Return what the ranks of the members do; None if a member has said nothing new, because its ranks train."""
        oldest = time.monotonic() - _POSITIONS_SECONDS
        reports = [self._positions.get(node, (0.0, ())) for node in self._running_nodes()]
        if any(arrival < oldest for arrival, _ in reports):
            return None
        positions = [position for _, reported in reports for position in reported]
        if self._folder is not None:
            write_remote_positions(self._folder, positions)
        return positions

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
        self.memory.record(0, self.memory.own.inventory())
        self._broken_links.find(self._folder, own.failure, nodes=self._active)
        return self._join(own)

    def pending_change(self, *, can_grow: Callable[[], bool] = lambda: False) -> str:
        """Return why the attempt should stop and continue on other nodes, or "". Nodes join it only if `can_grow()`."""
        leaving = sorted(self._leaving.intersection(self._active))
        if leaving:
            return f"{self._describe(leaving[0])} was asked to stop; saving, then continuing without it"
        self._take_newcomers()
        chosen = self._choose_nodes()
        if len(chosen) <= len(self._active) or not self._running_nodes_are_well() or not can_grow():
            return ""
        new = [node for node in self._members if node in chosen and node not in self._active][-1]  # the last to come
        return f"node {new} ({self._names[new]}) has come; saving, then continuing on {plural(len(chosen), 'node')}"

    def gather(self, *, is_stopped: Callable[[], bool]) -> str:
        """Choose the nodes of the next attempt. Return why the run can't go on, or "" if it can.

        If a node was lost, another one may come for `nodes.last_call` seconds. If there are too few nodes, the wait
        lasts `nodes.wait` seconds.
        """
        start_time, report_seconds = time.monotonic(), _FIRST_REPORT_SECONDS
        while True:
            self._read_messages()  # a second node may be lost during the wait for the first
            self._take_newcomers()
            chosen, seconds = self._choose_nodes(), time.monotonic() - start_time
            is_full = len(chosen) == self.counts.largest_count
            is_called = not self._lost or seconds >= self.settings.last_call
            if is_full or (chosen and is_called):
                self._lost.clear()
                self._report_size(chosen)
                self._active = chosen
                self._leaving.intersection_update(self._members)
                return ""
            missing = self._describe_missing()
            if self._lost and not self.max_restarts:  # another failure came first, and is to be restarted
                return f"{missing} is gone, too (nodes.restarts is 0)."
            if is_stopped():
                return "a stop was requested."
            if not chosen and seconds > self.settings.wait:
                return f"{missing} did not come within {self.settings.wait:.0f} s."
            if seconds > report_seconds:
                report_seconds += min(report_seconds, _MAX_REPORT_SECONDS)
                limit = self.settings.last_call if chosen else self.settings.wait
                what = "more nodes" if chosen else missing
                print_line(f"waiting for {what}, for {limit - seconds:.0f} s more", sys.stderr)
            time.sleep(_POLL_SECONDS)

    def end(self, code: int, text: str) -> None:
        """End all members with the exit code of the run."""
        self._admission.close(code, text)
        self._take_newcomers()
        for node, member in self._members.items():
            member.link.send(as_message(EndNode(node=node, exit_code=code, text=text)))
            member.link.close()
        self._members.clear()
        self.memory.own.close()
        if self._reservation is not None:
            self._reservation.close()

    def _choose_nodes(self) -> list[int]:
        """Return the nodes that can run an attempt, the head first; none if there are too few.

        With parameter servers, these are all nodes of the run if those that are there can train without the others.
        """
        if self._workers.is_in_use:
            everybody = list(range(self.counts.largest_count))
            absent = [node for node in everybody[1:] if node not in self._members]
            return [] if self._workers.needed(absent, present=self._members) else everybody
        well = (node for node, member in self._members.items() if node not in self._leaving and not member.link.loss)
        present = [0, *sorted(well)]
        return present[: self.counts.largest_within(len(present))]

    def _take_newcomers(self) -> None:
        for node, member in self._admission.take().items():
            if node in self._members:  # it came again before its loss was seen
                self._lose(node, "another node took its place")
            if node in self._lost:
                self._lost.remove(node)
            self._leaving.discard(node)
            self._members[node] = member
            self._names.add(node, member.host, member.link.channel)
            if self._start is not None and not self._workers.is_in_use and node not in self._choose_nodes():
                print_line(
                    f"node {node} ({self._names[node]}) has come; it waits until more nodes are there", sys.stderr
                )
            if self._start is not None and self._workers.welcome(node):
                del self._results[node]
                print_line(f"{self._describe(node)} takes the place of the lost one", sys.stderr)
                again = {**self._start.request, "start_number": 2}
                self._start_part(node, msgspec.structs.replace(self._start, request=again))
                self._stays.arrive(self._new_stay(node))

    def _running_nodes_are_well(self) -> bool:
        """Return whether no node of the attempt has ended its part, or is silent."""
        return not self._results and not any(
            watch.is_silent for node, watch in self._silences.items() if node in self._active
        )

    def _report_size(self, chosen: Sequence[int]) -> None:
        """Say on how many nodes the run continues, if that changes."""
        if len(chosen) != len(self._active):
            ranks = plural(len(chosen) * self.ranks_per_node, "rank")
            nodes = f"{len(chosen)} of {plural(self.counts.first_count, 'node')}"
            print_line(f"continuing on {nodes}, with {ranks}", sys.stderr)

    def _describe_missing(self) -> str:
        """Return the lost nodes or, if others left, how many nodes are too few."""
        if len(self._lost) == 1 and not self.max_restarts:
            return self._describe(self._lost[0])
        if self._lost and self.counts.is_fixed:
            return format_nodes(sorted(self._lost))
        return f"another node ({len(self._members) + 1} of at least {self.counts.smallest_count} are here)"

    def _ranks(self, node: int) -> range:
        first = self._active.index(node) * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def _running_nodes(self) -> list[int]:
        return [node for node in self._active if node and node in self._members and node not in self._results]

    def _send_all(self, message: msgspec.Struct) -> None:
        for member in self._members.values():
            member.link.send(as_message(message))

    def _record(self, node: int, message: Any) -> None:
        """Record the end of a member's part, or why it leaves. Ends of earlier attempts are left out."""
        with suppress(msgspec.ValidationError, TypeError):
            ended = msgspec.convert(message, PartEnded | NodeLeaves | NodeLeft | RankPositions)
            if isinstance(ended, NodeLeaves):
                self._leaving.add(node)
            elif isinstance(ended, RankPositions):
                if ended.attempt == self._attempt:
                    self._positions[node] = time.monotonic(), ended.on_host(self._names[node])
            elif isinstance(ended, NodeLeft):
                self._farewells[node] = ended.reason
            elif ended.attempt == self._attempt:
                if node in self._leaving and ended.exit_code == ExitCode.INTERRUPTED:
                    self._lose(node, "it was asked twice to stop")
                    return
                self.memory.record(node, ended.inventory)
                self._broken_links.record(node, ended.broken_links)
                failure = ended.read_failure(host=self._names[node])
                result = PartResult(exit_code=ended.exit_code, failure=failure, progress=ended.progress)
                self._record_end(node, result, silence=0.0)

    def _record_end(self, node: int, result: PartResult, *, silence: float) -> bool:
        """Record the end of a node's part. Return whether the attempt goes on without it."""
        running = [other for other in self._running_nodes() if other != node]
        self._results[node] = result
        return self._workers.spare(node, result, name=self._describe(node), running=running, silence=silence)

    def _watch_silence(self, node: int, member: Member) -> None:
        """Say that a node is silent, or count it as lost."""
        seconds = member.link.silence_seconds
        watch = self._silences.setdefault(node, SilenceWatch(self.settings.patience))
        if member.link.loss:
            self._lose(node, self._farewells.pop(node, "its agent has ended, or the connection to it was lost"))
        elif watch.is_gone(seconds):
            text = f"node 0 has given this node up: nothing came from it for {seconds:.0f} s"
            end = EndNode(node=node, exit_code=int(ExitCode.STOPPED), text=text, may_return=True)
            member.link.send(as_message(end))
            self._lose(node, f"nothing for {seconds:.0f} s")
        elif line := watch.news(self._describe(node), seconds):
            print_line(line, sys.stderr)

    def _lose(self, node: int, reason: str) -> None:
        """Count a node as lost, which is a failure of the attempt unless the node had ended its part."""
        member = self._members.pop(node)
        self.memory.forget(node)
        silence = member.link.silence_seconds
        message = self._losses.add(self._describe(node), member.link, reason=reason)
        member.link.close()
        self._admission.vacate(member.link.channel)
        self._stays.leave(node, reason)
        self._silences.pop(node, None)
        self._farewells.pop(node, None)
        if node in self._active and node not in self._leaving:
            self._lost.append(node)
        if node not in self._active and node not in self._leaving:
            print_line(f"node {node} ({self._names[node]}), which waited, has gone: {reason}", sys.stderr)
        elif node in self._results and node not in self._leaving:
            print_line(message, sys.stderr)
        if node in self._results or node not in self._active:
            return
        failure = lost_node_failure(
            message, rank=self._ranks(node).start, host=self._names[node], silent_seconds=silence
        )
        result = PartResult(exit_code=failure.exit_code, failure=failure, progress=AttemptProgress())
        if not self._record_end(node, result, silence=silence):
            self._has_unfinished_loss = True
        elif self.max_restarts:
            print_line(f"node {node} may come again, or another one instead: the same command there", sys.stderr)

    def _describe(self, node: int) -> str:
        ranks = f", {describe_ranks(self._ranks(node))}" if node in self._active else ""
        return f"node {node} ({self._names[node]}{ranks})"

    def _new_stay(self, node: int) -> NodeStay:
        member, ranks = self._members.get(node), self._ranks(node)
        address = self._own_address() if member is None else member.link.channel.peer_address
        return NodeStay.begin(node, host=self._names.hosts[node], address=address, ranks=ranks)

    def _join(self, own: PartResult) -> PartResult:
        """Return the result of the attempt from those of its parts."""
        own_failure = own.failure
        if own_failure is not None and own_failure.rank >= 0 and not own_failure.is_joint:
            node = self._active[min(own_failure.rank // self.ranks_per_node, len(self._active) - 1)]
            own_failure = replace(own_failure, host=self._names[node])
        parts = [own, *(result for node, result in self._results.items() if self._workers.counts(node))]
        failures = [own_failure, *(part.failure for part in parts[1:])]
        progress = join_progress(part.progress for part in parts)
        self._last_step = progress.last_step(before=self._last_step)
        first = first_failure([failure for failure in failures if failure is not None])
        if first is not None and first.kind == LOST_NODE:
            first = self._losses.explain(first, failures, head=self._describe(0), is_alone=not self._members)
            first = replace(first, step=progress.step, message=f"{first.message}; last step {self._last_step}")
        elif first is not None:
            first = self._broken_links.name_in(first, members=self._members, describe=self._describe)
        code = exit_code({number: part.exit_code for number, part in enumerate(parts)}, first)
        return PartResult(exit_code=code, failure=first, progress=progress)
