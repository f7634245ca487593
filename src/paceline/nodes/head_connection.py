"""The way of a node to the head of a run: it connects, introduces itself, and waits for a place."""

import math
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.errors import MachineError, PacelineError, UsageError
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.network_interfaces import is_own_address, resolve_host
from paceline.nodes.node_meeting import (
    FIRST_REPORT_SECONDS,
    HELLO_SECONDS,
    MAX_REPORT_SECONDS,
    PROTOCOL,
    SPARE_RETRY_SECONDS,
    Hello,
)
from paceline.nodes.node_place import NodePlace

UNKNOWN_HOST_SECONDS = 20.0  # for a name that no scheduler makes known later
_CONNECT_SECONDS, _RETRY_SECONDS = 3.0, 0.1
_REFUSED = int(UsageError.exit_code)


class RunOverError(Exception):
    """The run has ended, and this node was not needed. `exit_code` is that of the run."""

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def join_head(
    place: NodePlace,
    *,
    wait_seconds: float,
    host_seconds: float = math.inf,
    problem: str = "",
    waits_for_place: bool = False,
    has_met: bool = False,
    report_seconds: float = FIRST_REPORT_SECONDS,
    report: Callable[[str], None] = lambda _: None,
) -> LineChannel:
    """Connect to the head, and introduce this node, or say why it can't take part.

    A host name without an address is tried again for `host_seconds`. With `waits_for_place`, a head whose nodes are all
    there is asked again until `wait_seconds` are over. So is one that breaks the connection, if this node `has_met` it
    before. `report` gets a line if the head can't be reached for `report_seconds`, has no place, or is gone.

    Raises:
        MachineError: the head can't be reached within `wait_seconds`, it refuses this node, or another program answers.
        UsageError: the head has refused the command.
        RunOverError: the run has ended while this node waited for a place.
    """
    deadline, reported = time.monotonic() + wait_seconds, ""
    while True:
        channel = _connect(
            place, deadline=deadline, host_seconds=host_seconds, report_seconds=report_seconds, report=report
        )
        answer = _introduce(channel, place, problem=problem, seconds=wait_seconds + HELLO_SECONDS)
        if isinstance(answer, dict) and answer.get("do") == "welcome":
            return channel
        channel.close()
        if isinstance(answer, dict) and answer.get("is_over") is True:
            raise RunOverError(int(answer["exit_code"]), str(answer["text"]))
        is_full = isinstance(answer, dict) and answer.get("is_full") is True
        is_gone = has_met and isinstance(answer, str)
        if not (waits_for_place and (is_full or is_gone)) or time.monotonic() > deadline:
            raise _refused_error(place, answer)
        text = "all nodes are here already; waiting in case one of them is lost"
        if is_gone:
            text = f"the head {_address(place)} is gone ({answer}); waiting for it"
        if text != reported:
            report(text)
        has_met, reported = True, text
        time.sleep(SPARE_RETRY_SECONDS)


def _connect(
    place: NodePlace, *, deadline: float, host_seconds: float, report_seconds: float, report: Callable[[str], None]
) -> LineChannel:
    """Return the connection to the head.

    Raises:
        MachineError: it can't be reached until `deadline`, or its name has no address for `host_seconds`.
    """
    report_time = time.monotonic() + report_seconds
    unknown_since: float | None = None
    while True:
        try:
            connection = socket.create_connection((place.head_host, place.port), timeout=_CONNECT_SECONDS)
            return LineChannel(connection, key=secrets.token_hex(8))
        except (OSError, UnicodeError) as error:
            now, is_unknown = time.monotonic(), isinstance(error, socket.gaierror | UnicodeError)
            if is_unknown and unknown_since is None:
                unknown_since, report_time = now, now  # is said at once
            elif not is_unknown and unknown_since is not None:
                unknown_since, report_time = None, now + report_seconds
            end_time = deadline if unknown_since is None else min(deadline, unknown_since + host_seconds)
            problem = _unknown_host(place) if is_unknown else _unreachable_head(place, error)
            if now > end_time:
                raise problem from None
            if now >= report_time:
                report_time = now + MAX_REPORT_SECONDS if is_unknown else deadline
                report(f"{problem.what} Trying again for {end_time - now:.0f} s")
            time.sleep(_RETRY_SECONDS)


def _introduce(channel: LineChannel, place: NodePlace, *, problem: str, seconds: float) -> Any:
    """Return the head's answer to the first message of this node, or the text of an error."""
    hello = Hello(
        protocol=PROTOCOL,
        num_nodes=place.num_nodes,
        node=place.node,
        host=socket.gethostname(),
        problem=problem,
        counts=place.counts,
        key=channel.key,
    )
    try:
        return channel.ask(msgspec.to_builtins(hello), timeout_seconds=seconds)
    except OSError as error:
        return getattr(error, "strerror", None) or str(error)


def _refused_error(place: NodePlace, answer: Any) -> PacelineError:
    """Return the error for an answer to the first message that is no welcome."""
    if isinstance(answer, dict) and answer.get("do") == "end":
        kind = UsageError if answer.get("exit_code") == _REFUSED else MachineError
        text = str(answer.get("text")).rstrip(".")
        return kind(f"the head sends this node away: {text}.", where=_address(place))
    problem = f" ({answer})" if isinstance(answer, str) else ""
    return MachineError(
        f"another program than paceline answers at {_address(place)}{problem}.",
        hint=f"on {place.head_host}: ss -ltnp sport = :{place.port}; or another port: --nodes N:HOST:PORT",
    )


def _address(place: NodePlace) -> str:
    return f"{place.head_host}:{place.port}"


def _unknown_host(place: NodePlace) -> MachineError:
    return MachineError(
        f"the host {place.head_host} has no address.",
        cause="the name is wrong, or this machine does not know it",
        hint=f"getent hosts {place.head_host}; or its IP address in its place: --nodes {place.counts}:IP",
    )


def _unreachable_head(place: NodePlace, error: Exception) -> MachineError:
    address = resolve_host(place.head_host)
    known_as = f" ({address})" if address and address != place.head_host else ""
    what = (
        f"the head {place.head_host}{known_as}, port {place.port}, can't be reached: "
        f"{getattr(error, 'strerror', None) or error}"
    )
    if place.node and not place.is_played and address and is_own_address(address):
        return MachineError(
            f"{what}; this machine is {place.head_host} itself, the host of node 0.",
            cause=f"the command with --node 0 does not run here, and this one has --node {place.node}",
            hint="--node 0, or no --node, in the command on this machine",
        )
    return MachineError(
        f"{what}.",
        cause="the command is not running there, it has ended, or a firewall is in between",
        hint=f"nc -vz {place.head_host} {place.port}",
    )
