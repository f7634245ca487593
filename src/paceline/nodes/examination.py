"""The examination of machines before a training: all nodes meet, and node 0 says what is wrong.

The head asks each member, one request at a time: for its clock, to open a link server, to test links, to look for a
file, and to end. Links are tested in rounds of disjoint pairs, so that no stream slows another one down.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ExitCode
from paceline.nodes.fact_findings import judge_facts
from paceline.nodes.finding import Finding
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.link_findings import MeasuredLink, judge_links
from paceline.nodes.link_test import LinkServer, link_result, try_link
from paceline.nodes.machine_facts import MachineFacts
from paceline.nodes.node_meeting import Meeting, end_member, gather_nodes, join_head, lost_head
from paceline.nodes.node_place import NodePlace

_NUM_CLOCK_READINGS = 5
_STREAM_SECONDS = 0.2
_SHORT_SECONDS, _LONG_SECONDS = 10.0, 120.0
_LOOK_SECONDS, _POLL_SECONDS = 3.0, 0.05


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The result of an examination: the facts of the nodes by their number, their links, and the findings."""

    facts: dict[int, MachineFacts]
    links: tuple[MeasuredLink, ...] = ()
    findings: tuple[Finding, ...] = ()
    num_nodes: int = 1

    @property
    def exit_code(self) -> int:
        """3 if something is wrong, else 0."""
        return int(ExitCode.MACHINE if self.findings else ExitCode.DONE)


def examine_machine(facts: MachineFacts) -> Examination:
    """Judge one machine alone."""
    return Examination(facts={0: facts}, findings=tuple(judge_facts({0: facts})))


def examine_nodes(
    listener: socket.socket,
    place: NodePlace,
    facts: MachineFacts,
    *,
    run_folder: Path,
    wait_seconds: float,
    report: Callable[[str], None],
) -> Examination:
    """Examine all nodes as the head: wait for them, compare them, test their links, and end them with one exit code."""
    with listener:
        meeting = gather_nodes(listener, place, head_facts=facts, wait_seconds=wait_seconds, report=report)
    head = _Head(meeting, facts)
    try:
        skews = head.measure_skews()
        links = head.test_links()
        findings = [
            *meeting.findings,
            *judge_links(links, {node: machine.host for node, machine in head.facts.items()}),
            *head.check_run_folder(run_folder),
            *judge_facts(head.facts, skews=skews),
            *head.lost_members,
        ]
        examination = Examination(
            facts=head.facts, links=tuple(links), findings=tuple(findings), num_nodes=place.num_nodes
        )
        head.end(examination)
        return examination
    finally:
        head.close()


def take_part(place: NodePlace, facts: MachineFacts, *, run_folder: Path, wait_seconds: float) -> tuple[int, str]:
    """Do what the head asks, as a member. Return the exit code and the text that the head sends at the end.

    Raises:
        MachineError: the head can't be reached, or has hung up.
    """
    channel = join_head(place, facts, wait_seconds=wait_seconds)
    server: LinkServer | None = None
    try:
        while True:
            request = channel.receive(timeout_seconds=wait_seconds + _LONG_SECONDS)
            if request["do"] == "end":
                return int(request["exit_code"]), str(request["text"])
            if request["do"] == "serve":
                server = LinkServer(channel.own_address)
                channel.send(server.address)
            elif request["do"] == "look":
                channel.send(_look_for(run_folder / Path(str(request["name"])).name))
            elif request["do"] == "try":
                channel.send(_try_links(request["addresses"]))
            else:
                channel.send(time.time())
    except (OSError, KeyError, TypeError) as error:
        raise lost_head(place, error) from None
    finally:
        channel.close()
        if server is not None:
            server.close()


def _try_links(addresses: Sequence[Sequence[Any]]) -> list[Any]:
    """Test the links to some addresses, one after the other, and return the results as JSON."""
    results = [try_link((str(host), int(port)), stream_seconds=_STREAM_SECONDS) for host, port in addresses]
    return [msgspec.to_builtins(result) for result in results]


def _look_for(path: Path) -> bool:
    """Return whether a file that the head has just written is there; on a network disk, it may take a moment."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return path.exists()


class _Head:
    """The head's side of an examination. A member that is lost is left out from then on, and is a finding."""

    def __init__(self, meeting: Meeting, facts: MachineFacts) -> None:
        self.facts = {0: facts, **{node: member.facts for node, member in meeting.members.items()}}
        self.lost_members: list[Finding] = []
        self._channels: dict[int, LineChannel] = {node: member.channel for node, member in meeting.members.items()}
        self._servers: list[LinkServer] = []

    def measure_skews(self) -> dict[int, float]:
        """Return the seconds by which each node's clock is ahead, from the reading that took the least time."""
        skews = {}
        for node in list(self._channels):
            readings = []
            for _ in range(_NUM_CLOCK_READINGS):
                start_time = time.time()
                answer = self._ask(node, {"do": "clock"}, timeout_seconds=_SHORT_SECONDS)
                end_time = time.time()
                if isinstance(answer, int | float):
                    readings.append((end_time - start_time, answer - (start_time + end_time) / 2))
            if readings:
                skews[node] = min(readings)[1]
        return skews

    def test_links(self) -> list[MeasuredLink]:
        """Test the links between all pairs of nodes, in both directions."""
        addresses = self._open_servers()
        links: list[MeasuredLink] = []
        with ThreadPoolExecutor(max_workers=max(1, len(addresses) // 2)) as pool:
            for pairs in disjoint_pairs(sorted(addresses)):
                tests = [pool.submit(self._test_pair, pair, addresses) for pair in pairs]
                links += [link for test in tests for link in test.result()]
        return sorted(links, key=lambda link: (link.source, link.target))

    def check_run_folder(self, folder: Path) -> list[Finding]:
        """Check that the other nodes see what this node writes to the run folder."""
        blind = []
        probe = folder / f".paceline-shared-{socket.gethostname()}-{os.getpid()}"
        try:
            probe.write_text("x")
        except OSError:
            return []  # the head's own facts say so
        try:
            for node in list(self._channels):
                if not self._ask(node, {"do": "look", "name": probe.name}, timeout_seconds=_SHORT_SECONDS):
                    blind.append(node)
        finally:
            with suppress(OSError):
                probe.unlink()
        if not blind:
            return []
        names = ", ".join(f"node {node} ({self.facts[node].host})" for node in blind)
        what = f"{names}: what node 0 writes to the run folder ({folder}) is not there, so the folder is not shared"
        return [
            Finding(what=what, hint="--run-dir on a disk that all nodes mount at the same place", nodes=tuple(blind))
        ]

    def end(self, examination: Examination) -> None:
        """Tell all members the result."""
        num_findings = len(examination.findings)
        text = f"node 0 found {num_findings} problems" if num_findings > 1 else "node 0 found a problem"
        for channel in self._channels.values():
            end_member(channel, exit_code=examination.exit_code, text=text if num_findings else "nothing is wrong")

    def close(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            channel.close()
        for server in self._servers:
            server.close()

    def _open_servers(self) -> dict[int, tuple[str, int]]:
        """Let every node listen, and return the addresses. The head listens where the first member reaches it."""
        addresses: dict[int, tuple[str, int]] = {}
        for node in list(self._channels):
            if not self._servers:
                self._servers.append(LinkServer(self._channels[node].own_address))
                addresses[0] = self._servers[0].address
            answer = self._ask(node, {"do": "serve"}, timeout_seconds=_SHORT_SECONDS)
            if isinstance(answer, list) and len(answer) == 2:
                addresses[node] = str(answer[0]), int(answer[1])
        return addresses

    def _test_pair(self, pair: tuple[int, int], addresses: Mapping[int, tuple[str, int]]) -> list[MeasuredLink]:
        """Test the links of a pair of nodes, one direction after the other."""
        first, second = pair
        links = [self._test(first, second, addresses), self._test(second, first, addresses)]
        return [link for link in links if link is not None]

    def _test(self, source: int, target: int, addresses: Mapping[int, tuple[str, int]]) -> MeasuredLink | None:
        """Test one link, and return None if its source is lost."""
        if source == 0:
            result = try_link(addresses[target], stream_seconds=_STREAM_SECONDS)
        else:
            request = {"do": "try", "addresses": [addresses[target]]}
            answer = self._ask(source, request, timeout_seconds=_LONG_SECONDS)
            try:
                result = link_result(answer[0])
            except (TypeError, IndexError, msgspec.ValidationError):
                return None
        return MeasuredLink(source=source, target=target, result=result)

    def _ask(self, node: int, request: dict[str, Any], *, timeout_seconds: float) -> Any:
        """Return a member's answer; None if it is lost."""
        channel = self._channels.get(node)
        if channel is None:
            return None
        try:
            return channel.ask(request, timeout_seconds=timeout_seconds)
        except OSError as error:
            channel.close()
            del self._channels[node]
            what = f"node {node} ({self.facts[node].host}) came, but then left: {error.strerror or error}"
            self.lost_members.append(Finding(what=what, hint="its own output says why", nodes=(node,)))
            return None


def disjoint_pairs(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs, in which every pair of nodes occurs once and no node twice in a round."""
    ring: list[int | None] = [*nodes, *([None] * (len(nodes) % 2))]
    rounds = []
    for _ in range(len(ring) - 1):
        halves = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append([(first, second) for first, second in halves if first is not None and second is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds
