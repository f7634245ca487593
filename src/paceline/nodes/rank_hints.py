"""The advice of errors on several nodes, where they would say what to type on one machine."""

import re

from paceline.nodes.node_place import split_counts

_RANKS_OPTION = re.compile(r"(?<!on one machine, )--ranks (\d+)\b(?! in place of)")


def hint_for_nodes(hint: str, *, num_nodes: int) -> str:
    """Return a hint that says `--ranks-per-node` where it says `--ranks`, which `--nodes` excludes."""

    def replace_option(match: re.Match[str]) -> str:
        ranks = int(match[1])
        if ranks == 1:
            return "--ranks 1 in place of --nodes"
        if ranks % num_nodes == 0:
            return f"--ranks-per-node {ranks // num_nodes}"
        return f"{ranks} ranks on all nodes together (--nodes N:HOST --ranks-per-node K)"

    return _RANKS_OPTION.sub(replace_option, hint)


def join_hint(nodes: str) -> str:
    """Return what to type after ranks could not join each other. `nodes` is the value of `--nodes`."""
    counts, num_nodes = split_counts(nodes)
    host = nodes.removeprefix(counts)
    if not host:
        return "PACELINE_LOOPBACK=1 before the same command, whose nodes then have no networks of their own"
    return f"on every node: paceline doctor --nodes {num_nodes}{host}, which names what is wrong"
