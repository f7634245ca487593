"""The advice of errors on several nodes, where they would say what to type on one machine."""

import re

from paceline.nodes.node_place import split_counts

_RANKS_OPTION = re.compile(r"--ranks (?P<ranks>\d+)\b(?P<more>(?: --\S+ \S*[^\s,])*)")  # and further options
_RANKS_ON_NODES = re.compile(rf"(?<!on one machine, ){_RANKS_OPTION.pattern}")
_IN_PLACE = " in place of --nodes"
_NODES_WITH_HOST = re.compile(r"--nodes (\d+(?::\d+)?):HOST\b")


def hint_for_nodes(hint: str, *, nodes: str) -> str:
    """Return a hint that says `--ranks-per-node` where it says `--ranks`, which `--nodes` excludes.

    `nodes` is the value of `--nodes`. If the ranks can't be shared equally, the hint names fewer nodes, or one machine.
    """
    counts, num_nodes = split_counts(nodes)
    host = nodes.removeprefix(counts)

    def replace_option(match: re.Match[str]) -> str:
        if match.string.startswith(_IN_PLACE, match.end()):
            return match[0]
        nodes_to_use, per_node = _equal_share(int(match["ranks"]), num_nodes)
        if nodes_to_use == 1:
            return f"{match[0]}{_IN_PLACE}"
        place = "" if nodes_to_use == num_nodes else f"--nodes {nodes_to_use}{host} "
        return f"{place}--ranks-per-node {per_node}{match['more']}"

    return _RANKS_ON_NODES.sub(replace_option, hint)


def hint_for_submit(hint: str, *, num_nodes: int) -> str:
    """Return a hint in the options of `paceline submit`, which takes no `--ranks` and no host."""

    def replace_option(match: re.Match[str]) -> str:
        nodes_to_use, per_node = _equal_share(int(match["ranks"]), num_nodes)
        place = "" if nodes_to_use == num_nodes else f"--nodes {nodes_to_use} "
        return f"{place}--ranks-per-node {per_node}{match['more']}"

    return _NODES_WITH_HOST.sub(r"--to ray --nodes \1", _RANKS_OPTION.sub(replace_option, hint))


def _equal_share(ranks: int, num_nodes: int) -> tuple[int, int]:
    """Return the largest number of nodes, at most `num_nodes`, with equal shares of the ranks, and this share."""
    nodes = next(count for count in range(max(1, min(ranks, num_nodes)), 0, -1) if ranks % count == 0)
    return nodes, ranks // nodes


def join_hint(nodes: str) -> str:
    """Return what to type after ranks could not join each other. `nodes` is the value of `--nodes`."""
    counts, num_nodes = split_counts(nodes)
    host = nodes.removeprefix(counts)
    if not host:
        return "PACELINE_LOOPBACK=1 before the same command, whose nodes then have no networks of their own"
    return f"on every node: paceline doctor --nodes {num_nodes}{host}, which names what is wrong"
