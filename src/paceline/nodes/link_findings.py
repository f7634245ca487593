"""Judgement of the links between nodes: one finding for a node that no other one reaches, else one for each pair."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import ExitCode
from paceline.nodes.finding import Finding
from paceline.nodes.link_measurement import LinkResult

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
        code = 0 if problem == "slow" else int(ExitCode.MACHINE)
        hint = next((hint for text, hint in _HINTS if text in problem), "ping; ip route get ADDRESS")
        if len(bad) == len(links) > 2:
            found.append(Finding(what=f"every link: {_describe(problem, bad)}", hint=hint, refusal_code=code))
            continue
        targets = [node for node in hosts if _are_all_bad([link for link in links if link.target == node], bad)]
        others = [link for link in links if link.target not in targets]
        sources = [node for node in hosts if _are_all_bad([link for link in others if link.source == node], bad)]
        for node in dict.fromkeys([*targets, *sources]):
            to_node = [link for link in bad if link.target == node and node in targets]
            from_node = [link for link in bad if link.source == node and node in sources]
            direction = "of" if to_node and from_node else "to" if to_node else "from"
            text = f"all links {direction} node {node} ({hosts[node]}): {_describe(problem, [*to_node, *from_node])}"
            found.append(Finding(what=text, hint=hint, nodes=(node,), refusal_code=code))
        rest = [link for link in bad if link.source not in sources and link.target not in targets]
        for pair in dict.fromkeys(frozenset((link.source, link.target)) for link in rest):
            own = [link for link in rest if pair == {link.source, link.target}]
            text = f"{_name_pair(own, hosts)}: {_describe(problem, own)}"
            found.append(Finding(what=text, hint=hint, refusal_code=code))
    return found


def _are_all_bad(links: Sequence[MeasuredLink], bad: Sequence[MeasuredLink]) -> bool:
    """Return whether all of these links are bad; a single one says nothing about its ends."""
    return len(links) > 1 and all(link in bad for link in links)


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
