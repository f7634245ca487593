"""The machines of the other ranks: with them, an error of gloo, which has the address of a peer, names its host."""

import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.nodes.network_interfaces import list_interfaces

_ADDRESS = re.compile(r"\[?(\d{1,3}(?:\.\d{1,3}){3})\]?")
_MAX_RANKS = 8


class PeerMachines:
    """The host and the ranks of each address. It is empty if all ranks are on this machine."""

    def __init__(self) -> None:
        self._hosts: dict[str, str] = {}
        self._ranks: dict[str, list[int]] = {}
        self.hosts: tuple[str, ...] = ()
        """The host of each rank; empty if all ranks are on this machine."""

    def record(self, machines: Sequence[Mapping[str, Any]]) -> None:
        """Remember the machine of each rank, as `this_machine` describes it on that rank."""
        self._hosts, self._ranks = {}, {}
        self.hosts = tuple(str(machine["host"]) for machine in machines)
        for rank, machine in enumerate(machines):
            self._ranks.setdefault(machine["host"], []).append(rank)
            self._hosts.update(dict.fromkeys(machine["addresses"], machine["host"]))

    def describe(self, message: str) -> str:
        """Return the machine whose address an error message contains last, unless it is this one; empty without any.

        The message of a failed connection may contain this machine's own address before that of the peer.
        """
        for address in reversed(_ADDRESS.findall(message)):
            host = self._hosts.get(address)
            if host is not None and host != socket.gethostname():
                ranks = self._ranks[host]
                more = ", ..." if len(ranks) > _MAX_RANKS else ""
                names = ", ".join(map(str, ranks[:_MAX_RANKS])) + more
                return f"{host} ({address}, {'rank' if len(ranks) == 1 else 'ranks'} {names})"
        return ""


def this_machine() -> dict[str, Any]:
    """Return the host name and the addresses of this machine, as JSON."""
    addresses = [interface.address for interface in list_interfaces() if not interface.is_loopback]
    return {"host": socket.gethostname(), "addresses": addresses}


peer_machines = PeerMachines()
"""The machines of the ranks of this process's world."""
