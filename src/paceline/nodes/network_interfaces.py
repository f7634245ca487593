"""The network interfaces of this machine, asked from the kernel.

`/sys/class/net` is not read, because inside a network namespace it may show the interfaces of another one.
"""

import fcntl
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from paceline.errors import UsageError

_GET_ADDRESS, _GET_MTU = 0x8915, 0x8921  # SIOCGIFADDR and SIOCGIFMTU of Linux
_OUTSIDE = "192.0.2.1"  # an address of documentation, which only the default route leads to
_ANY_PORT = 9  # connecting a datagram socket sends nothing


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface with an IPv4 address; `mtu` is the size in bytes of its largest packet, 0 if unknown."""

    name: str
    address: str
    mtu: int

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches the interface."""
        return self.address.startswith("127.")


def list_interfaces() -> list[Interface]:
    """Return the interfaces of this machine that have an IPv4 address; none on a system other than Linux."""
    found: list[Interface] = []
    if sys.platform != "linux":
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                address = socket.inet_ntoa(_ask(probe, _GET_ADDRESS, name)[20:24])
                found.append(Interface(name=name, address=address, mtu=_mtu(probe, name)))
    return found


def interface_name(address: str, interfaces: Sequence[Interface]) -> str:
    """Return the name of the interface with this address; empty if none has it."""
    return next((interface.name for interface in interfaces if interface.address == address), "")


def interface_address(name: str) -> str:
    """Return the IPv4 address of an interface of this machine.

    Raises:
        UsageError: there is no such interface.
    """
    interfaces = list_interfaces()
    address = next((interface.address for interface in interfaces if interface.name == name), "")
    if not address:
        names = ", ".join(interface.name for interface in interfaces)
        raise UsageError(
            f"this machine has no interface {name} with an IPv4 address.", hint=f"nodes.interface: {names}"
        )
    return address


def address_towards(host: str) -> str:
    """Return this machine's own address on the route to a host; empty if the host is unknown or has no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _ANY_PORT))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def interface_towards(host: str) -> str:
    """Return the interface by which other machines reach this one on the way from a host; empty if it is not clear.

    The route to the host itself may be the loopback interface. Then it is the interface of the default route, or the
    only one.
    """
    interfaces = [interface for interface in list_interfaces() if not interface.is_loopback]
    for target in (host, _OUTSIDE):
        name = interface_name(address_towards(target), interfaces)
        if name:
            return name
    return interfaces[0].name if len(interfaces) == 1 else ""


def resolve_host(name: str) -> str:
    """Return the IPv4 address of a host name; empty if it has none."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return ""


def ipv6_address(name: str) -> str:
    """Return an IPv6 address of a host name; empty if it has none."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET6, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return ""


def is_own_address(address: str) -> bool:
    """Return whether an address belongs to this machine, so that a socket can be bound to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _mtu(probe: socket.socket, name: str) -> int:
    try:
        return int(struct.unpack_from("i", _ask(probe, _GET_MTU, name), 16)[0])
    except OSError:
        return 0


def _ask(probe: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(probe.fileno(), request, name.encode()[:15].ljust(256, b"\0"))
