"""The meeting of nodes: the head listens, the others connect, and each gets a number.

Whoever can reach the port of the head can take a seat: the network is trusted, as it is by gloo and NCCL.
"""

import errno
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from paceline.console.formatting import plural
from paceline.errors import MachineError, UsageError
from paceline.nodes.finding import Finding, format_nodes
from paceline.nodes.line_channel import SIGN, LineChannel, accept_connection, close_listener
from paceline.nodes.network_interfaces import ipv6_address, is_own_address, resolve_host
from paceline.nodes.node_place import NodePlace

PROTOCOL = "paceline-nodes-1"
HELLO_SECONDS = 5.0  # for the first message
SPARE_RETRY_SECONDS = 1.0  # between the requests of a node for which there is no place
FIRST_REPORT_SECONDS, MAX_REPORT_SECONDS = 5.0, 60.0
_POLL_SECONDS = 0.2
_REFUSED, _NO_MEETING = int(UsageError.exit_code), int(MachineError.exit_code)
_MAX_STRANGERS = 64
_HOST_NAME = re.compile(r"[\w.-]{1,253}", re.ASCII)


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a node to the head. It fits into one small packet, which every network lets through."""

    protocol: str
    num_nodes: int
    node: int | None
    host: str
    problem: str = ""
    """Why the node can't take part, such as a missing file; then the head ends all nodes."""
    counts: str = ""
    """The numbers of nodes as they were typed, such as 2:4."""
    key: str = ""
    """The name under which the node connects again to say that it is alive."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A node that has come to the head."""

    hello: Hello
    channel: LineChannel


def listen_as_head(place: NodePlace) -> socket.socket | None:
    """Return the listening socket if this process is the head, or None.

    Without a number, the first process on the head's machine that can listen is the head.

    Raises:
        UsageError: this is node 0, but the head's host is another machine; or the host has only an IPv6 address.
        MachineError: this is node 0, and the port is in use.
    """
    address = resolve_host(place.head_host)
    if not address:
        _refuse_ipv6_only(place)
    is_head_machine = bool(address) and is_own_address(address)
    if place.node not in (None, 0) or (place.node is None and not is_head_machine):
        return None
    if address and not is_head_machine:
        raise UsageError(
            f"this is node 0, but {place.head_host} ({address}) is another machine.",
            cause="node 0 is where the nodes meet",
            hint="--nodes N:HOST with this machine, or the number 0 on the other one",
        )
    try:
        return socket.create_server(("", place.port), backlog=256)
    except OSError as error:
        if place.node is None and error.errno == errno.EADDRINUSE:
            return None
        raise MachineError(
            f"node 0 can't listen on port {place.port}: {os.strerror(error.errno or 0).lower()}.",
            cause="the same command was started twice, or another program uses the port",
            hint=f"ss -ltnp sport = :{place.port}; or another port: --nodes N:HOST:PORT",
        ) from None


def _refuse_ipv6_only(place: NodePlace) -> None:
    """Refuse a host without an IPv4 address; one without any address may get one later.

    Raises:
        UsageError
    """
    address = ipv6_address(place.head_host)
    if address:
        raise UsageError(
            f"the host {place.head_host} has only an IPv6 address ({address}), and the nodes meet over IPv4.",
            cause="its IPv4 address is missing in /etc/hosts or the DNS",
            hint=f"--nodes {place.counts}:ADDRESS with an IPv4 address of {place.head_host}: ip -4 addr, there",
        )


class Reception:
    """The head's reception: a thread welcomes the nodes, each in a thread of its own, until `close`.

    A node with another number of nodes, or a wrong number of its own, ends with `misfit_code`.
    """

    def __init__(self, listener: socket.socket, place: NodePlace, *, misfit_code: int = _REFUSED) -> None:
        self._misfit_code = misfit_code
        self._listener = listener
        self.place = place
        self._arrivals: list[Arrival] = []
        self._refusals: dict[str, Finding] = {}  # of nodes that were sent away, by their host
        self._problems: list[Finding] = []  # of nodes that can't take part
        self._is_complete, self._is_open_again, self._is_over = False, False, False
        self._returned: set[LineChannel] = set()  # of the arrivals that `wait` or `next_arrivals` has returned
        self._ending: tuple[str, int] | None = None
        self._last_spare_time = -math.inf  # when a node has asked for which there is no place
        self._changed = threading.Condition()
        self._free_threads = threading.Semaphore(_MAX_STRANGERS + place.num_nodes)
        threading.Thread(target=self._accept, name="paceline-reception", daemon=True).start()

    def wait(
        self,
        *,
        wait_seconds: float,
        report: Callable[[str], None],
        last_call_seconds: float = 0.0,
        report_seconds: float = FIRST_REPORT_SECONDS,
    ) -> tuple[dict[int, Arrival], list[Finding]]:
        """Wait until all nodes have come, or `wait_seconds` are over.

        `report` gets a line about the wait now and then, the first after `report_seconds`. If the number of nodes may
        change, the wait also ends `last_call_seconds` after the smallest number is there. Return the nodes by their
        number, and what was wrong: nodes that did not come, that can't take part, and wrong numbers. Later nodes are
        sent away, unless `open_again` is called.
        """
        start_time, enough_time = time.monotonic(), math.inf
        next_report_seconds, reported = report_seconds, set[str]()
        with self._changed:
            while len(self._arrivals) < self.place.num_nodes - 1 and not self._problems:
                self._drop_closed()
                now = time.monotonic()
                seconds = now - start_time
                has_enough = len(self._arrivals) + 1 >= self.place.min_nodes
                enough_time = min(enough_time, now) if has_enough else math.inf
                if seconds > wait_seconds or now - enough_time > last_call_seconds:
                    break
                if seconds > next_report_seconds:
                    next_report_seconds += min(next_report_seconds, MAX_REPORT_SECONDS)
                    left = wait_seconds - seconds if not has_enough else last_call_seconds - (now - enough_time)
                    report(f"{self._describe_arrivals()}; waiting for {left:.0f} s more")
                for host in [host for host in self._refusals if host not in reported]:
                    reported.add(host)
                    report(f"sent away: {self._refusals[host].what} ({self._refusals[host].hint})")
                self._changed.wait(min(_POLL_SECONDS, wait_seconds))
            self._is_complete = True
            seats = self._number_seats()
            self._returned |= {arrival.channel for arrival in self._arrivals}
            is_enough = len(seats) + 1 >= self.place.min_nodes
            missing = [] if is_enough else [node for node in range(1, self.place.num_nodes) if node not in seats]
            # If all places are taken, it does not matter who else was sent away.
            findings = [*(self._refusals.values() if missing else ()), *self._problems]
            self._refusals.clear()
            self._problems.clear()
        if missing and not findings:  # else somebody was sent away
            has_numbers = any(arrival.hello.node is not None for arrival in seats.values())
            are_numbered = has_numbers and not self.place.is_elastic
            num_missing = self.place.min_nodes - 1 - len(seats)
            names = format_nodes(missing) if are_numbered else plural(num_missing, "node")
            hosts = [arrival.hello.host for arrival in seats.values()]
            here = f"here are {', '.join(['the head', *hosts])}" if hosts else "only the head is here"
            what = f"{names} did not come within {wait_seconds:.0f} s; {here}"
            check = f"nc -vz {self.place.head_host} {self.place.port}"
            hint = f"on the others, the same command; whether they reach this one: {check}"
            findings.append(Finding(what=what, hint=hint, refusal_code=_NO_MEETING))
        return seats, findings

    def _describe_arrivals(self) -> str:
        """Return who is here, and the numbers of those who are not, if the nodes have numbers of their own."""
        names = ", ".join(["the head", *(arrival.hello.host for arrival in self._arrivals)])
        numbers = [arrival.hello.node for arrival in self._arrivals]
        if self.place.is_elastic:
            return f"{len(numbers) + 1} of {self.place.min_nodes} to {self.place.num_nodes} nodes are here: {names}"
        missing = [node for node in range(1, self.place.num_nodes) if node not in numbers]
        text = f"{len(self._arrivals) + 1} of {self.place.num_nodes} nodes are here: {names}"
        return text if None in numbers else f"{text}; missing: {format_nodes(missing)}"

    def open_again(self) -> None:
        """Welcome nodes from now on if there is a place for them, for `next_arrivals`."""
        with self._changed:
            self._is_complete, self._is_open_again = False, True

    def next_arrivals(self, *, seconds: float) -> tuple[dict[int, Arrival], list[Finding]]:
        """Return the nodes that have come since the last call, by their number, and what was wrong with others.

        If there are none, wait for up to `seconds`.
        """
        with self._changed:
            if not self._refusals and not self._problems and not self._new_arrivals():
                self._changed.wait(seconds)
            self._drop_closed()
            new_channels = {arrival.channel for arrival in self._new_arrivals()}
            seats = {node: seat for node, seat in self._number_seats().items() if seat.channel in new_channels}
            findings = [*self._refusals.values(), *self._problems]
            self._returned |= new_channels
            self._refusals.clear()
            self._problems.clear()
        return seats, findings

    def _new_arrivals(self) -> list[Arrival]:
        return [arrival for arrival in self._arrivals if arrival.channel not in self._returned]

    def vacate(self, channel: LineChannel) -> None:
        """Free the place of the node with this channel, which is lost, for another one."""
        with self._changed:
            for arrival in [arrival for arrival in self._arrivals if arrival.channel is channel]:
                self._remove(arrival)

    def _remove(self, arrival: Arrival) -> None:
        arrival.channel.close()
        self._arrivals.remove(arrival)
        self._returned.discard(arrival.channel)

    def turn_away(self, text: str, *, exit_code: int, seconds: float) -> None:
        """End every node that comes within `seconds`, because this one can't start the run."""
        with self._changed:
            self._ending = (text, exit_code)
            for arrival in self._arrivals:
                end_member(arrival.channel, node=arrival.hello.node, exit_code=exit_code, text=text)
        time.sleep(seconds)

    def dismiss_spares(self, text: str, *, exit_code: int) -> None:
        """End the nodes that wait for a place, each when it asks the next time, because the run has ended."""
        with self._changed:
            self._is_over, self._ending = True, (text, exit_code)
            is_waited_for = time.monotonic() - self._last_spare_time < 3 * SPARE_RETRY_SECONDS
        if is_waited_for:
            time.sleep(2 * SPARE_RETRY_SECONDS)

    def close(self) -> None:
        """End the reception. The channels of the nodes that have come stay open."""
        close_listener(self._listener)

    def _accept(self) -> None:
        while (connection := accept_connection(self._listener)) is not None:
            if not self._free_threads.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._welcome, args=(connection,), name="paceline-welcome", daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        """Seat a node; whatever else has connected is dropped."""
        channel = LineChannel(connection)
        try:
            message = channel.receive(timeout_seconds=HELLO_SECONDS)
            if isinstance(message, dict) and message.get("do") == SIGN:
                self._answer_sign(message, channel)
                return
            with self._changed:
                self._seat(message, channel)
                self._changed.notify()
        except (OSError, msgspec.ValidationError):
            channel.close()
        finally:
            self._free_threads.release()

    def _answer_sign(self, message: Mapping[str, Any], channel: LineChannel) -> None:
        """Note that a node is alive whose own connection is stalled. Nobody else gets an answer.

        Raises:
            OSError: the node has gone.
        """
        with self._changed:
            owners = [arrival for arrival in self._arrivals if arrival.hello.key == message.get("key") != ""]
            for arrival in owners:
                arrival.channel.note_sign()
        if owners:
            channel.send({"do": SIGN})
        channel.close()

    def _seat(self, message: Any, channel: LineChannel) -> None:
        """Add a node that has come, or end it if that is not possible.

        Raises:
            msgspec.ValidationError: this is no node.
            OSError: the node has gone.
        """
        protocol, host = (message.get(name) if isinstance(message, dict) else None for name in ("protocol", "host"))
        if isinstance(protocol, str) and isinstance(host, str) and _HOST_NAME.fullmatch(host) and protocol != PROTOCOL:
            self._refuse(channel, host, "has another version of Paceline", hint="the same version on every node")
            return
        hello = msgspec.convert(message, Hello)
        if not _HOST_NAME.fullmatch(hello.host):
            raise msgspec.ValidationError("no host name")
        self._drop_closed()
        if self._is_open_again and hello.node in [arrival.hello.node for arrival in self._arrivals]:
            hello = msgspec.structs.replace(hello, node=None)  # the node was lost, and another one has its number now
        hosts = {0: "the head", **{arrival.hello.node: arrival.hello.host for arrival in self._arrivals}}
        last = self.place.num_nodes - 1
        if self._ending is not None:
            marks = {"is_over": True} if self._is_over else {}
            end_member(channel, node=None, exit_code=self._ending[1], text=self._ending[0], **marks)
        elif self._is_complete or len(self._arrivals) == last:
            self._last_spare_time = time.monotonic()
            text = "all nodes are here already"
            end_member(channel, node=None, exit_code=_NO_MEETING, text=text, is_full=True)
        elif hello.num_nodes != last + 1:
            counts = hello.counts.replace(":", " to ") or hello.num_nodes
            what = f"expects {counts} nodes, and the head {self.place.counts.replace(':', ' to ')}"
            self._refuse(channel, hello.host, what, hint="the same --nodes on every node")
        elif hello.node is not None and not 0 <= hello.node <= last:
            what = f"says that it is node {hello.node}, and there are nodes 0 to {last}"
            self._refuse(channel, hello.host, what, hint=f"each node its own --node, from 0 to {last}")
        elif hello.node is not None and hello.node in hosts:
            what = f"says that it is node {hello.node}, and so does {hosts[hello.node]}"
            self._refuse(channel, hello.host, what, hint=f"each node its own --node, from 0 to {last}")
        elif hello.problem:
            self._problems.append(Finding(what=f"{hello.host}: {hello.problem}", hint="", refusal_code=_REFUSED))
            end_member(channel, node=None, exit_code=_REFUSED, text=hello.problem)
        else:
            channel.send({"do": "welcome", "protocol": PROTOCOL})
            self._arrivals.append(Arrival(hello=hello, channel=channel))
            self._refusals.pop(hello.host, None)  # it was typed again

    def _drop_closed(self) -> None:
        """Free the seats of nodes that have gone, perhaps to be started again.

        `wait` and `next_arrivals` have given the others away, and their new owner calls `vacate`.
        """
        for arrival in [arrival for arrival in self._new_arrivals() if arrival.channel.is_closed]:
            self._remove(arrival)

    def _refuse(self, channel: LineChannel, host: str, problem: str, *, hint: str) -> None:
        self._refusals[host] = Finding(what=f"{host} {problem}", hint=hint, refusal_code=self._misfit_code)
        end_member(channel, node=None, exit_code=self._misfit_code, text=f"{host} {problem}")

    def _number_seats(self) -> dict[int, Arrival]:
        """Return the nodes by their number. Those without one get the free numbers in the order of arrival."""
        taken = {arrival.hello.node for arrival in self._arrivals}
        free = iter([node for node in range(1, self.place.num_nodes) if node not in taken])
        for place, arrival in enumerate(self._arrivals):
            if arrival.hello.node is None:
                hello = msgspec.structs.replace(arrival.hello, node=next(free))
                self._arrivals[place] = replace(arrival, hello=hello)
        return {arrival.hello.node or 0: arrival for arrival in sorted(self._arrivals, key=_node_number)}


def _node_number(arrival: Arrival) -> int:
    return arrival.hello.node or 0


def end_member(channel: LineChannel, *, node: int | None, exit_code: int, text: str, **marks: bool) -> None:
    """Tell a node that it may end, with which exit code, and which number it had.

    With the mark `is_full`, there is only no place for the node at the moment; with `is_over`, the run has ended.
    """
    with suppress(OSError):
        channel.send({"do": "end", "node": node, "exit_code": exit_code, "text": text, **marks})
    channel.close()
