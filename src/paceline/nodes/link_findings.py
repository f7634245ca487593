"""Judgement of the links between nodes: one finding for a node that no other one reaches, else one for each pair."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.nodes.finding import Finding
from paceline.nodes.link_test import LinkResult

_HINTS = (
    ("refused", "a firewall rejects: open the ports above 1024 between the nodes"),
    ("no answer", "a firewall drops packets: open the ports above 1024 between the nodes"),
    ("no route", "ip route get ADDRESS"),
    ("connected, then nothing", "small packets pass, and large ones do not: lower the MTU of all nodes (ip link set)"),
    ("slow", "ethtool DEVICE; or another interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"),
)


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """The tested link from one node to another."""

    source: int
    target: int
    result: LinkResult

    @property
    def problem(self) -> str:
        """Return what is wrong with the link; empty if nothing is."""
        return "slow" if self.result.is_slow else self.result.problem


def judge_links(links: Sequence[MeasuredLink], hosts: Mapping[int, str]) -> list[Finding]:
    """Return what is wrong with the links. `hosts` has the host name of each node, by its number."""
    found: list[Finding] = []
    for problem in dict.fromkeys(link.problem for link in links if link.problem):
        bad = [link for link in links if link.problem == problem]
        hint = next((hint for text, hint in _HINTS if text in problem), "ping; ip route get ADDRESS")
        if len(bad) == len(links) > 2:
            found.append(Finding(what=f"every link: {_describe(problem, bad)}", hint=hint))
            continue
        bad_nodes = [node for node in hosts if _is_bad_node(node, bad, links)]
        for node in bad_nodes:
            own = [link for link in bad if node in (link.source, link.target)]
            text = f"all links of node {node} ({hosts[node]}): {_describe(problem, own)}"
            found.append(Finding(what=text, hint=hint, nodes=(node,)))
        rest = [link for link in bad if link.source not in bad_nodes and link.target not in bad_nodes]
        for ends in dict.fromkeys(frozenset((link.source, link.target)) for link in rest):
            own = [link for link in rest if ends == {link.source, link.target}]
            found.append(Finding(what=f"{_name_pair(own, hosts)}: {_describe(problem, own)}", hint=hint))
    return found


def _is_bad_node(node: int, bad: Sequence[MeasuredLink], links: Sequence[MeasuredLink]) -> bool:
    """Return whether all links to a node, or all links from it, are bad. Of two nodes, none is to blame."""
    for end in ("target", "source"):
        num_links = sum(getattr(link, end) == node for link in links)
        if num_links > 1 and num_links == sum(getattr(link, end) == node for link in bad):
            return True
    return False


def _name_pair(links: Sequence[MeasuredLink], hosts: Mapping[int, str]) -> str:
    first, second = links[0].source, links[0].target
    names = f"node {first} ({hosts[first]})", f"node {second} ({hosts[second]})"
    return f"{names[0]} -> {names[1]}" if len(links) == 1 else f"between {names[0]} and {names[1]}"


def _describe(problem: str, links: Sequence[MeasuredLink]) -> str:
    if problem != "slow":
        return problem
    slowest = min(link.result.bytes_per_second for link in links) / (1 << 20)
    longest = max(link.result.ping_seconds for link in links) * 1e3
    return f"slow: {slowest:.1f} MiB/s, ping {longest:.1f} ms"
