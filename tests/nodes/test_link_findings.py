"""What is said of links: one line for a node that nobody reaches well, else one for each pair."""

from paceline.nodes.examination import disjoint_pairs
from paceline.nodes.link_findings import MeasuredLink, judge_links
from paceline.nodes.link_measurement import LinkResult

HOSTS = {node: f"host{node}" for node in range(3)}
GOOD = LinkResult(ping_seconds=1e-4, bytes_per_second=1e9)
SLOW = LinkResult(ping_seconds=1e-4, bytes_per_second=2 << 20)
DEAD = LinkResult(problem="no answer to a connection")


def links(bad: dict[tuple[int, int], LinkResult]) -> list[MeasuredLink]:
    pairs = [(source, target) for source in HOSTS for target in HOSTS if source != target]
    return [MeasuredLink(source=s, target=t, result=bad.get((s, t), GOOD)) for s, t in pairs]


def told(bad: dict[tuple[int, int], LinkResult]) -> list[str]:
    return [finding.what for finding in judge_links(links(bad), HOSTS)]


def test_good_links_give_no_finding() -> None:
    assert told({}) == []


def test_a_node_that_nobody_reaches_is_one_finding() -> None:
    (finding,) = judge_links(links({(0, 1): DEAD, (2, 1): DEAD}), HOSTS)
    assert finding.what == "all links to node 1 (host1): no answer to a connection" and finding.nodes == (1,)
    assert "firewall" in finding.hint
    slow = {(0, 1): SLOW, (2, 1): SLOW, (1, 0): SLOW, (1, 2): SLOW}
    assert told(slow) == ["all links of node 1 (host1): slow: 2.0 MiB/s, ping 0.1 ms"]


def test_two_bad_nodes_are_two_findings_and_so_is_a_node_that_reaches_nobody() -> None:
    hosts = {node: f"host{node}" for node in range(5)}
    pairs = [(source, target) for source in hosts for target in hosts if source != target]
    walls = [MeasuredLink(source=s, target=t, result=DEAD if t in (1, 2) else GOOD) for s, t in pairs]
    assert [finding.nodes for finding in judge_links(walls, hosts)] == [(1,), (2,)]
    mute = [MeasuredLink(source=s, target=t, result=DEAD if s == 3 else GOOD) for s, t in pairs]
    assert [finding.what[:20] for finding in judge_links(mute, hosts)] == ["all links from node 3"[:20]]


def test_of_three_nodes_the_head_is_not_blamed_for_the_walls_of_the_others() -> None:
    walls = {(0, 1): DEAD, (2, 1): DEAD, (0, 2): DEAD, (1, 2): DEAD}
    assert [finding.nodes for finding in judge_links(links(walls), HOSTS)] == [(1,), (2,)]


def test_a_pair_is_one_finding_and_nobody_is_blamed() -> None:
    (finding,) = judge_links(links({(0, 1): DEAD, (1, 0): DEAD}), HOSTS)
    assert finding.what == "between node 0 (host0) and node 1 (host1): no answer to a connection"
    assert finding.nodes == ()
    assert told({(2, 0): SLOW}) == ["node 2 (host2) -> node 0 (host0): slow: 2.0 MiB/s, ping 0.1 ms"]


def test_a_trouble_of_all_links_is_one_finding() -> None:
    stalled = LinkResult(problem="connected, then nothing for 3 s")
    (finding,) = judge_links(
        [MeasuredLink(source=s, target=t, result=stalled) for s in HOSTS for t in HOSTS if s != t], HOSTS
    )
    assert finding.what == "every link: connected, then nothing for 3 s" and "MTU" in finding.hint


def test_different_troubles_are_different_findings() -> None:
    assert len(told({(0, 1): DEAD, (2, 0): SLOW})) == 2


def test_rounds_have_each_pair_once_and_no_node_twice() -> None:
    for count in range(2, 9):
        rounds = disjoint_pairs(list(range(count)))
        pairs = [tuple(sorted(pair)) for pairs in rounds for pair in pairs]
        assert sorted(pairs) == [(i, j) for i in range(count) for j in range(i + 1, count)]
        assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
        assert len(rounds) == count - 1 + count % 2
