"""The meeting of nodes: the head listens, the others connect, and each gets a number."""

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from paceline.errors import MachineError
from paceline.nodes.finding import Finding
from paceline.nodes.line_channel import ChannelClosed, LineChannel
from paceline.nodes.machine_facts import MachineFacts
from paceline.nodes.network_interfaces import is_own_address, list_interfaces, resolve_host
from paceline.nodes.node_place import NodePlace

PROTOCOL = "paceline-nodes-1"
_HELLO_SECONDS, _WELCOME_SECONDS = 5.0, 20.0
_RETRY_SECONDS = 0.1
_REPORT_SECONDS = 5.0


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a node to the head."""

    protocol: str
    num_nodes: int
    node: int | None
    facts: MachineFacts


@dataclass(kw_only=True)
class Member:
    """A node that has come, as the head sees it."""

    facts: MachineFacts
    channel: LineChannel


@dataclass(kw_only=True)
class Meeting:
    """The nodes that have come to the head, by their number, without the head itself."""

    members: dict[int, Member] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    """What was wrong: nodes that did not come, and numbers that came twice."""


def listen_as_head(place: NodePlace) -> socket.socket | None:
    """Return the listening socket if this process is the head, or None.

    Without a number, the first process on the head's machine that can listen is the head.

    Raises:
        MachineError: this is node 0, and the port is in use.
    """
    is_head_machine = is_own_address(resolve_host(place.head_host), list_interfaces())
    if place.node not in (None, 0) or (place.node is None and not is_head_machine):
        return None
    try:
        return socket.create_server(("", place.port), backlog=256)
    except OSError as error:
        if place.node is None and error.errno == errno.EADDRINUSE:
            return None
        raise MachineError(
            f"node 0 can't listen on port {place.port}: {(error.strerror or str(error)).lower()}.",
            hint=f"ss -ltnp sport = :{place.port}; or another port: --nodes N:HOST:PORT",
        ) from None


def gather_nodes(
    listener: socket.socket,
    place: NodePlace,
    *,
    head_facts: MachineFacts,
    wait_seconds: float,
    report: Callable[[str], None],
) -> Meeting:
    """Wait until all nodes have come, or `wait_seconds` are over. `report` gets a line now and then about the wait."""
    meeting, arrived = Meeting(), list[tuple[Hello, LineChannel]]()
    deadline, next_report = time.monotonic() + wait_seconds, time.monotonic() + _REPORT_SECONDS
    while len(arrived) < place.num_nodes - 1 and time.monotonic() < deadline:
        listener.settimeout(max(0.01, min(deadline, next_report) - time.monotonic()))
        if time.monotonic() >= next_report:
            report(f"{len(arrived) + 1} of {place.num_nodes} nodes are here: {_hosts(head_facts, arrived)}")
            next_report += _REPORT_SECONDS
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        welcomed = _welcome(connection)
        if welcomed is not None:
            _seat(meeting, arrived, *welcomed, place=place, head_facts=head_facts)
    _number(meeting, arrived, num_nodes=place.num_nodes)
    missing = [node for node in range(1, place.num_nodes) if node not in meeting.members]
    for node in missing:
        what = f"node {node} did not come within {wait_seconds:.0f} s"
        hint = f"is the command running there? On it: nc -vz {place.head_host} {place.port}"
        meeting.findings.append(Finding(what=what, hint=hint, nodes=(node,)))
    return meeting


def _welcome(connection: socket.socket) -> tuple[Hello, LineChannel] | None:
    """Return what a node says first; None if something else has connected."""
    channel = LineChannel(connection)
    try:
        hello = msgspec.convert(channel.receive(timeout_seconds=_HELLO_SECONDS), Hello)
    except (OSError, msgspec.ValidationError):
        channel.close()
        return None
    if hello.protocol != PROTOCOL:
        channel.close()
        return None
    with suppress(OSError):
        channel.send(PROTOCOL)
    return hello, channel


def _seat(
    meeting: Meeting,
    arrived: list[tuple[Hello, LineChannel]],
    hello: Hello,
    channel: LineChannel,
    *,
    place: NodePlace,
    head_facts: MachineFacts,
) -> None:
    """Add a node that has come, unless its number is taken, or it expects another number of nodes."""
    hosts = {0: head_facts.host, **{other.node: other.facts.host for other, _ in arrived if other.node is not None}}
    if hello.num_nodes != place.num_nodes:
        what = f"{hello.facts.host} expects {hello.num_nodes} nodes, and the head {place.num_nodes}"
        hint = "the same --nodes on every node"
    elif hello.node in hosts:
        what = f"node number {hello.node} came twice: from {hosts[hello.node]} and from {hello.facts.host}"
        hint = f"each node its own --node, from 0 to {place.num_nodes - 1}"
    else:
        arrived.append((hello, channel))
        return
    meeting.findings.append(Finding(what=what, hint=hint))
    end_member(channel, exit_code=int(MachineError.exit_code), text=what)


def _number(meeting: Meeting, arrived: list[tuple[Hello, LineChannel]], *, num_nodes: int) -> None:
    """Give the free numbers to the nodes without one, in the order in which they came."""
    taken = {hello.node for hello, _ in arrived}
    free = iter([node for node in range(1, num_nodes) if node not in taken])
    for hello, channel in arrived:
        node = next(free) if hello.node is None else hello.node
        meeting.members[node] = Member(facts=hello.facts, channel=channel)
    meeting.members = dict(sorted(meeting.members.items()))


def _hosts(head_facts: MachineFacts, arrived: list[tuple[Hello, LineChannel]]) -> str:
    return ", ".join([head_facts.host, *(hello.facts.host for hello, _ in arrived)])


def join_head(place: NodePlace, facts: MachineFacts, *, wait_seconds: float) -> LineChannel:
    """Connect to the head, and introduce this node.

    Raises:
        MachineError: the head can't be reached within `wait_seconds`, or somebody else answers at its port.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            connection = socket.create_connection((place.head_host, place.port), timeout=3.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable_head(place, error) from None
            time.sleep(_RETRY_SECONDS)
    channel = LineChannel(connection)
    hello = Hello(protocol=PROTOCOL, num_nodes=place.num_nodes, node=place.node, facts=facts)
    try:
        if channel.ask(msgspec.to_builtins(hello), timeout_seconds=_WELCOME_SECONDS) == PROTOCOL:
            return channel
        problem: Exception = ChannelClosed("it speaks another protocol")
    except OSError as error:
        problem = error
    channel.close()
    raise lost_head(place, problem)


def _unreachable_head(place: NodePlace, error: OSError) -> MachineError:
    address = resolve_host(place.head_host)
    known_as = f" ({address})" if address and address != place.head_host else ""
    if not address:
        return MachineError(
            f"the host {place.head_host} has no address.", hint="getent hosts NAME; or its IP address in --nodes"
        )
    return MachineError(
        f"the head {place.head_host}{known_as}, port {place.port}, can't be reached: {error.strerror or error}.",
        cause="the command is not running there, or a firewall is in between",
        hint=f"nc -vz {place.head_host} {place.port}",
    )


def lost_head(place: NodePlace, error: Exception) -> MachineError:
    """Return the error for a head that has hung up, or that is something else than a head."""
    text = str(error) if isinstance(error, ChannelClosed) else getattr(error, "strerror", None) or str(error)
    return MachineError(
        f"whoever answers at {place.head_host}:{place.port} is no Paceline command, or it was ended: {text}.",
        hint=f"on {place.head_host}: ss -ltnp sport = :{place.port}; or another port: --nodes N:HOST:PORT",
    )


def end_member(channel: LineChannel, *, exit_code: int, text: str) -> None:
    """Tell a node that it may end, and with which exit code."""
    with suppress(OSError):
        channel.send({"do": "end", "exit_code": exit_code, "text": text})
    channel.close()
