"""The examination of machines before a training: all nodes meet, and node 0 says what is wrong.

The head asks the members for their facts, for their clock, to open a link server, to test links, to look for a file,
and to end. Links are tested in rounds of disjoint pairs, so that no stream slows another one down.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ExitCode, MachineError
from paceline.nodes.fact_findings import judge_facts
from paceline.nodes.finding import Finding, distinct_hosts, format_nodes
from paceline.nodes.head_connection import join_head
from paceline.nodes.line_channel import ChannelError, LineChannel
from paceline.nodes.link_findings import MeasuredLink, judge_links
from paceline.nodes.link_measurement import LinkResult, LinkServer, try_link
from paceline.nodes.machine_facts import RUN_FOLDER_OPTION, MachineFacts
from paceline.nodes.node_meeting import Arrival, Reception, end_member
from paceline.nodes.node_place import NodePlace
from paceline.nodes.run_folder_check import RunFolderProbe, look_for_probe

_NUM_CLOCK_READINGS = 5
_STREAM_SECONDS = 0.2
_FIRST_REPORT_SECONDS = 0.5  # the user should read within a second why the command waits
_SHORT_SECONDS, _LINK_SECONDS, _FACTS_SECONDS = 10.0, 30.0, 120.0
_MAX_THREADS = 32
END, RUN = "end", "run"  # messages that are no question: the node may end, or the run begins
_STUCK_SECONDS = 2.0
_LOWER_MTU = "lower the MTU of all nodes: ip link set DEVICE mtu 1500"
_OWN_OUTPUT = "its own output says why"
_FOLLOWS = "facts follow"  # a small message before a large one


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The result of an examination: the facts of the nodes by their number, their links, and the findings."""

    facts: dict[int, MachineFacts]
    links: tuple[MeasuredLink, ...] = ()
    findings: tuple[Finding, ...] = ()
    num_nodes: int = 1

    @property
    def problems(self) -> list[Finding]:
        """The findings that are no notes."""
        return [finding for finding in self.findings if not finding.is_note]

    @property
    def host_names(self) -> dict[int, str]:
        """The host of each node, with its address if another node has the same host name."""
        return _host_names(self.facts)

    @property
    def exit_code(self) -> int:
        """3 if something is wrong, else 0."""
        return int(ExitCode.MACHINE if self.problems else ExitCode.DONE)

    @property
    def verdict(self) -> str:
        """The result in a few words, for the other nodes."""
        num_problems = len(self.problems)
        if num_problems > 1:
            return f"node 0 found {num_problems} problems"
        return "node 0 found a problem" if num_problems else "nothing is wrong"

    @property
    def excluded_hosts(self) -> list[str]:
        """The hosts to leave out: those that a finding blames, if they are less than half, and not the head."""
        blamed = {node for finding in self.problems for node in finding.nodes if node in self.facts}
        is_possible = 0 not in blamed and 2 * len(blamed) < self.num_nodes
        sound_hosts = {machine.host for node, machine in self.facts.items() if node not in blamed}
        hosts = dict.fromkeys(self.facts[node].host for node in sorted(blamed))
        return [host for host in hosts if host not in sound_hosts] if is_possible else []


def examine_machine(facts: MachineFacts, *, run_folder: Path) -> Examination:
    """Judge one machine alone."""
    probe = RunFolderProbe(run_folder)
    probe.remove()
    findings = [*_write_findings({0: probe.problem}, {0: facts.host}, run_folder), *judge_facts({0: facts})]
    return Examination(facts={0: facts}, findings=tuple(findings))


def examine_nodes(
    reception: Reception,
    facts: MachineFacts,
    *,
    run_folder: Path,
    wait_seconds: float,
    report: Callable[[str], None],
) -> Examination:
    """Examine all nodes as the head: wait for them, compare them, test their links, and end them with one exit code."""
    seats, findings = reception.wait(wait_seconds=wait_seconds, report=report, report_seconds=_FIRST_REPORT_SECONDS)
    channels = [arrival.channel for arrival in seats.values()]
    try:
        examination = examine_seats(
            seats,
            facts,
            findings=findings,
            run_folder=run_folder,
            num_nodes=reception.place.num_nodes,
            stream_seconds=_STREAM_SECONDS,
        )
        for node, arrival in seats.items():
            end_member(arrival.channel, node=node, exit_code=examination.exit_code, text=examination.verdict)
        return examination
    finally:
        for channel in channels:
            channel.close()


def examine_seats(
    seats: Mapping[int, Arrival],
    facts: MachineFacts,
    *,
    findings: Sequence[Finding],
    run_folder: Path,
    num_nodes: int,
    stream_seconds: float = 0.0,
) -> Examination:
    """Examine the nodes that have come. The members stay connected, but for those that were lost meanwhile.

    `findings` has what was wrong with the meeting. With `stream_seconds=0`, the speed of the links is not measured.
    """
    head = _Head(seats, facts)
    probe = RunFolderProbe(run_folder)  # before others look into the folder: NFS remembers for a while what is missing
    try:
        head.read_facts()
        skews = head.measure_skews()
        links = head.test_links(stream_seconds=stream_seconds)
        found = [*findings, *head.check_run_folder(run_folder, probe)]
        left = {node: machine for node, machine in head.facts.items() if node == 0 or node in head.channels}
        links = [link for link in links if link.source in left and link.target in left]
        found += judge_links(links, _host_names(left))
        found += judge_facts(head.facts, skews=skews)
        found += head.lost_members
        return Examination(facts=head.facts, links=tuple(links), findings=tuple(found), num_nodes=num_nodes)
    finally:
        probe.remove()
        head.close_servers()


def take_part(
    place: NodePlace,
    *,
    read_facts: Callable[[], MachineFacts],
    run_folder: Path,
    wait_seconds: float,
    host_seconds: float = math.inf,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Do what the head asks, as a member. Return its last message: `node`, `exit_code` and `text`.

    A head whose name has no address is given up after `host_seconds`. `report` gets a line if the head can't be reached
    within a second.

    Raises:
        MachineError: the head can't be reached, refuses this node, or has ended.
    """
    channel = join_head(
        place,
        wait_seconds=wait_seconds,
        host_seconds=host_seconds,
        report_seconds=_FIRST_REPORT_SECONDS,
        report=report,
    )
    try:
        end = answer_head(channel, place, read_facts=read_facts, run_folder=run_folder)
        return {"node": end["node"], "exit_code": int(end["exit_code"]), "text": str(end["text"])}
    finally:
        channel.close()


def answer_head(
    channel: LineChannel, place: NodePlace, *, read_facts: Callable[[], MachineFacts], run_folder: Path
) -> dict[str, Any]:
    """Answer the head's questions, and return its first message that is none: the end, or the start of a run.

    Raises:
        MachineError: the head has ended.
    """
    member = _Member(channel, read_facts=read_facts, run_folder=run_folder)
    try:
        while True:
            request = channel.receive(timeout_seconds=None)
            if request["do"] in (END, RUN):
                return {**request}
            for answer in member.answer(request):
                channel.send(answer)
    except (OSError, KeyError, TypeError, ValueError) as error:
        if member.error is not None:
            raise member.error from None
        raise _lost_head_error(place, error) from None
    finally:
        member.close()


def _lost_head_error(place: NodePlace, error: Exception) -> MachineError:
    """Return the error for a connection to the head that has ended, with the cause only if it is known."""
    cause = hint = ""
    if isinstance(error, ChannelError | ConnectionResetError | BrokenPipeError):
        cause = "the command on node 0 has ended, or has given this node up; its own output says why"
    elif isinstance(error, TimeoutError):
        cause = "the network does not deliver what this node sends, or no large packets of it"
        hint = f"ping -M do -s 1472 {place.head_host}; if only small packets pass, {_LOWER_MTU}"
    what = f"the connection to node 0 ended: {getattr(error, 'strerror', None) or error}."
    return MachineError(what, where=f"{place.head_host}:{place.port}", cause=cause, hint=hint)


class _Member:
    """The answers of a member to the requests of the head."""

    def __init__(self, channel: LineChannel, *, read_facts: Callable[[], MachineFacts], run_folder: Path) -> None:
        self.error: MachineError | None = None
        """The error of this machine itself that ended its part."""
        self._channel = channel
        self._read_facts = read_facts
        self._run_folder = run_folder
        self._servers: list[LinkServer] = []

    def answer(self, request: Mapping[str, Any]) -> list[Any]:
        """Return the messages that answer a request. A problem of this machine is kept in `error`, and raised."""
        kind = request["do"]
        try:
            if kind == "facts":
                return [_FOLLOWS, msgspec.to_builtins(self._read_facts())]
            if kind == "serve":
                self._servers.append(LinkServer(self._channel.own_address))
                return [self._servers[-1].address]
        except (OSError, ValueError) as error:
            self.error = MachineError(f"this machine can't answer node 0: {error}.")
            raise
        if kind == "try":
            host, port = request["address"]
            seconds = float(request["stream_seconds"])
            return [msgspec.to_builtins(try_link((str(host), int(port)), stream_seconds=seconds))]
        if kind == "look":
            return [[*look_for_probe(self._run_folder, str(request["name"])), str(self._run_folder.absolute())]]
        return [time.time()]

    def close(self) -> None:
        """End the link servers."""
        for server in self._servers:
            server.close()


class _Head:
    """The head's side of an examination. A member that is lost is left out from then on, and is a finding."""

    def __init__(self, seats: Mapping[int, Arrival], facts: MachineFacts) -> None:
        self.channels: dict[int, LineChannel] = {node: arrival.channel for node, arrival in seats.items()}
        self.lost_members: list[Finding] = []
        self._hosts = distinct_hosts(
            {0: facts.host, **{node: arrival.hello.host for node, arrival in seats.items()}},
            {node: arrival.channel.peer_address for node, arrival in seats.items()},
        )
        self._stream_seconds = 0.0
        self._servers: list[LinkServer] = []
        first = next(iter(self.channels.values()), None)
        # The route to itself is the loopback interface, so it takes the address at which a member reached it.
        own = facts if first is None else msgspec.structs.replace(facts, address=first.own_address)
        self.facts: dict[int, MachineFacts] = {0: own}

    def read_facts(self) -> None:
        """Ask all members for their facts. One whose facts do not arrive is left out."""
        answers = self._ask_all({"do": "facts"}, timeout_seconds=_FACTS_SECONDS)
        for node in [node for node, answer in answers.items() if answer == _FOLLOWS]:
            start_time = time.monotonic()
            try:
                answer = self.channels[node].receive(timeout_seconds=_SHORT_SECONDS)
                self.facts[node] = msgspec.convert(answer, MachineFacts)
            except (OSError, msgspec.ValidationError) as error:
                # The system of a node that has repeated a large message in vain may reset the connection.
                is_stuck = isinstance(error, OSError) and time.monotonic() - start_time > _STUCK_SECONDS
                self._lose(node, self._stuck(node) if is_stuck else self._left(node, str(error)))
        for node in [node for node in self.channels if node not in self.facts]:
            self._lose(node, self._left(node, "it sent no facts"))
        self.facts = dict(sorted(self.facts.items()))

    def measure_skews(self) -> dict[int, float]:
        """Return the seconds by which each node's clock is ahead, from the reading that took the least time."""
        return {node: skew for node in list(self.channels) if (skew := self._measure_skew(node)) is not None}

    def _measure_skew(self, node: int) -> float | None:
        readings = []
        for _ in range(_NUM_CLOCK_READINGS):
            start_time = time.time()
            answer = self._ask(node, {"do": "clock"}, timeout_seconds=_SHORT_SECONDS)
            end_time = time.time()
            if isinstance(answer, int | float):
                readings.append((end_time - start_time, answer - (start_time + end_time) / 2))
        return min(readings)[1] if readings else None

    def test_links(self, *, stream_seconds: float) -> list[MeasuredLink]:
        """Test the links between all pairs of nodes, in both directions."""
        self._stream_seconds = stream_seconds
        addresses = self._open_servers()
        links: list[MeasuredLink] = []
        with ThreadPoolExecutor(max_workers=_MAX_THREADS) as pool:
            for pairs in disjoint_pairs(sorted(addresses)):
                tests = [pool.submit(self._test_pair, pair, addresses) for pair in pairs]
                links += [link for test in tests for link in test.result()]
        return sorted(links, key=lambda link: (link.source, link.target))

    def _open_servers(self) -> dict[int, tuple[str, int]]:
        """Let every node listen on its address on the way to the head, and return the addresses."""
        if not self.channels:
            return {}
        self._servers.append(LinkServer(self.facts[0].address))
        addresses = {0: self._servers[0].address}
        for node, answer in self._ask_all({"do": "serve"}, timeout_seconds=_SHORT_SECONDS).items():
            with suppress(msgspec.ValidationError):
                addresses[node] = msgspec.convert(answer, tuple[str, int])
        return addresses

    def _test_pair(self, pair: tuple[int, int], addresses: Mapping[int, tuple[str, int]]) -> list[MeasuredLink]:
        """Test the links of a pair of nodes, one direction after the other."""
        first, second = pair
        links = [self._test(first, second, addresses), self._test(second, first, addresses)]
        return [link for link in links if link is not None]

    def _test(self, source: int, target: int, addresses: Mapping[int, tuple[str, int]]) -> MeasuredLink | None:
        """Test one link, and return None if its source is lost."""
        if source == 0:
            result = try_link(addresses[target], stream_seconds=self._stream_seconds)
        else:
            request = {"do": "try", "address": addresses[target], "stream_seconds": self._stream_seconds}
            answer = self._ask(source, request, timeout_seconds=_LINK_SECONDS)
            try:
                result = msgspec.convert(answer, LinkResult)
            except msgspec.ValidationError:
                return None
        return MeasuredLink(source=source, target=target, result=result)

    def check_run_folder(self, folder: Path, probe: RunFolderProbe) -> list[Finding]:
        """Check that all nodes can write the run folder, and see there the file of this node."""
        if probe.problem:
            return _write_findings({0: probe.problem}, self._hosts, folder)
        found, blind = list[Finding](), dict[str, list[int]]()
        problems: dict[int, str] = {}
        for node, answer in self._ask_all({"do": "look", "name": probe.name}, timeout_seconds=_SHORT_SECONDS).items():
            with suppress(msgspec.ValidationError):
                is_there, problems[node], path = msgspec.convert(answer, tuple[bool, str, str])
                if not is_there and not self._has_other_run(node):
                    blind.setdefault(path, []).append(node)
        for path, nodes in blind.items():
            names = f"{format_nodes(nodes)} ({', '.join(self._hosts[node] for node in nodes)})"
            what = f"{names}: what node 0 writes to the run folder ({folder.absolute()}) is not there"
            hint = "--run-dir on a disk that all nodes mount at the same place"
            if path != str(folder.absolute()):
                what = f"{names}: the run folder is {path} there, and {folder.absolute()} on node 0"
                hint = "the command in the same folder on every node, or an absolute --run-dir"
            found.append(Finding(what=what, hint=hint, nodes=tuple(nodes), refusal_code=int(ExitCode.MACHINE)))
        return [*_write_findings(problems, self._hosts, folder), *found]

    def _has_other_run(self, node: int) -> bool:
        """Return whether another run folder was typed on a node, which is a finding of its own."""
        runs = [self.facts[each].command.get(RUN_FOLDER_OPTION) for each in (0, node) if each in self.facts]
        return len(set(runs)) > 1 or len({self.facts[each].verb for each in (0, node) if each in self.facts}) > 1

    def close_servers(self) -> None:
        """End the servers of this node for link tests."""
        for server in self._servers:
            server.close()

    def _ask_all(self, request: dict[str, Any], *, timeout_seconds: float) -> dict[int, Any]:
        """Return the answers of all members that are not lost."""
        with ThreadPoolExecutor(max_workers=_MAX_THREADS) as pool:
            answers = {
                node: pool.submit(self._ask, node, request, timeout_seconds=timeout_seconds)
                for node in list(self.channels)
            }
            results = {node: answer.result() for node, answer in answers.items()}
        return {node: result for node, result in results.items() if node in self.channels}

    def _ask(self, node: int, request: dict[str, Any], *, timeout_seconds: float) -> Any:
        """Return a member's answer; None if it is lost."""
        channel = self.channels.get(node)
        if channel is None:
            return None
        try:
            return channel.ask(request, timeout_seconds=timeout_seconds)
        except OSError as error:
            self._lose(node, self._left(node, str(error.strerror or error)))
            return None

    def _stuck(self, node: int) -> Finding:
        what = f"node {node} ({self._hosts[node]}) is connected, but only small messages arrive"
        return Finding(what=what, hint=_LOWER_MTU, nodes=(node,), refusal_code=int(ExitCode.MACHINE))

    def _left(self, node: int, reason: str) -> Finding:
        what = f"node {node} ({self._hosts[node]}) came, but then left: {reason}"
        code = int(ExitCode.MACHINE)
        return Finding(what=what, hint=_OWN_OUTPUT, nodes=(node,), refusal_code=code)

    def _lose(self, node: int, finding: Finding) -> None:
        """Leave a member out, and tell it why: a small message may still arrive."""
        hint = "" if finding.hint == _OWN_OUTPUT else f" To do: {finding.hint}"
        text = f"node 0 has given this node up: {finding.what}.{hint}"
        end_member(self.channels.pop(node), node=node, exit_code=int(ExitCode.MACHINE), text=text)
        self.lost_members.append(finding)


def _host_names(facts: Mapping[int, MachineFacts]) -> dict[int, str]:
    """Return the host of each node, with its address if another node has the same host name."""
    return distinct_hosts(
        {node: machine.host for node, machine in facts.items()},
        {node: machine.address for node, machine in facts.items()},
    )


def _write_findings(problems: Mapping[int, str], hosts: Mapping[int, str], folder: Path) -> list[Finding]:
    """Return a finding for each reason why nodes can't write the run folder; an empty reason is none."""
    nodes_by_problem: dict[str, list[int]] = {}
    for node, problem in problems.items():
        if problem:
            nodes_by_problem.setdefault(problem, []).append(node)
    return [
        Finding(
            what=f"{format_nodes(nodes)} ({', '.join(hosts[node] for node in nodes)}): the run folder ({folder}) can't "
            f"be written: {problem}",
            hint="its owner and its mount; or another --run-dir",
            nodes=tuple(nodes),
            refusal_code=int(ExitCode.MACHINE),
        )
        for problem, nodes in nodes_by_problem.items()
    ]


def disjoint_pairs(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs, in which every pair of nodes occurs once and no node twice in a round."""
    ring: list[int | None] = [*nodes, *([None] * (len(nodes) % 2))]
    rounds = []
    for _ in range(len(ring) - 1):
        halves = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append([(first, second) for first, second in halves if first is not None and second is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds
