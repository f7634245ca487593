"""The machines of the other ranks: with them, an error of gloo, which has the address of a peer, names its host."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.nodes.finding import distinct_hosts
from paceline.nodes.network_interfaces import list_interfaces

_ADDRESS = re.compile(r"\[?(\d{1,3}(?:\.\d{1,3}){3})\]?")
_MAX_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """A machine with its addresses and ranks."""

    host: str
    addresses: tuple[str, ...]
    ranks: list[int]

    def is_same(self, other: "_Machine") -> bool:
        """Return whether both are one machine: they have one host name, and no other addresses altogether."""
        are_known = bool(self.addresses and other.addresses)
        return self.host == other.host and (not are_known or bool({*self.addresses} & {*other.addresses}))


class PeerMachines:
    """The host and the ranks of each address. It is empty if all ranks are on this machine."""

    def __init__(self) -> None:
        self._machines: list[_Machine] = []
        self.hosts: tuple[str, ...] = ()
        """The host of each rank, with its address if another machine has the same name; empty if all ranks are on
        this machine."""

    def record(self, machines: Sequence[Mapping[str, Any]]) -> None:
        """Remember the machine of each rank, as `this_machine` describes it on that rank."""
        self._machines = []
        for rank, machine in enumerate(machines):
            described = _Machine(host=str(machine["host"]), addresses=tuple(machine["addresses"]), ranks=[rank])
            known = next((each for each in self._machines if each.is_same(described)), None)
            if known is None:
                self._machines.append(described)
            else:
                known.ranks.append(rank)
        names = distinct_hosts(
            {number: each.host for number, each in enumerate(self._machines)},
            {number: each.addresses[0] for number, each in enumerate(self._machines) if each.addresses},
        )
        name_by_rank = {rank: names[number] for number, each in enumerate(self._machines) for rank in each.ranks}
        self.hosts = tuple(name_by_rank[rank] for rank in range(len(machines)))

    def describe(self, message: str) -> str:
        """Return the machine whose address an error message contains last, unless it is this one; empty without any.

        The message of a failed connection may contain this machine's own address before that of the peer.
        """
        own = this_machine()
        this = _Machine(host=own["host"], addresses=tuple(own["addresses"]), ranks=[])
        same_name = [machine for machine in self._machines if machine.host == this.host]
        for address in reversed(_ADDRESS.findall(message)):
            machine = next((each for each in reversed(self._machines) if address in each.addresses), None)
            is_this = machine is not None and machine in same_name and (len(same_name) == 1 or machine.is_same(this))
            if machine is not None and not is_this:
                ranks = machine.ranks
                more = ", ..." if len(ranks) > _MAX_RANKS else ""
                names = ", ".join(map(str, ranks[:_MAX_RANKS])) + more
                return f"{machine.host} ({address}, {'rank' if len(ranks) == 1 else 'ranks'} {names})"
        return ""


def this_machine() -> dict[str, Any]:
    """Return the host name and the addresses of this machine, as JSON."""
    addresses = [interface.address for interface in list_interfaces() if not interface.is_loopback]
    return {"host": socket.gethostname(), "addresses": addresses}


peer_machines = PeerMachines()
"""The machines of the ranks of this process's world."""
