"""The link that `plan --link` gives: rates, names of the catalogue, and the output of the doctor."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.planner.hardware.assumed_rates import assumption_lines
from paceline.planner.hardware.catalog import LINKS
from paceline.planner.hardware.given_link import read_given_link
from paceline.planner.hardware.parse_cluster import parse_cluster


def measured(source: int, target: int, rate: float, ping: float = 1e-3, problem: str = "") -> dict[str, object]:
    return {
        "source": source, "target": target, "ping_seconds": ping, "bytes_per_second": rate, "problem": problem,
    }  # fmt: skip


def write(folder: Path, *links: dict[str, object]) -> str:
    path = folder / "links.json"
    path.write_text(json.dumps({"ok": True, "nodes": {}, "links": links, "seconds": 1.0}))
    return str(path)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20Mbit/s", 2.5e6),
        (" 20 Mbit/s ", 2.5e6),
        ("1.5GB/s", 1.5e9),
        ("20mbit", 2.5e6),
        ("20 Mbit", 2.5e6),
        ("20Mbits/s", 2.5e6),
        ("20Mbps", 2.5e6),
        ("20Mb/s", 2.5e6),
        ("1gbit", 1.25e8),
        ("20MBps", 2e7),
        ("20MiBps", 20 * 2**20),
    ],
)
def test_a_rate_is_that_of_a_whole_machine(text: str, rate: float) -> None:
    link = read_given_link(text).link
    assert (link.bytes_per_second, link.is_shared, link.origin) == (rate, True, "given")
    assert "latency is assumed" in link.source


def test_a_name_of_the_catalogue() -> None:
    assert read_given_link("ETH-10g").link == replace(LINKS["eth-10g"], origin="given")


def test_the_slowest_measured_link_counts_with_half_of_the_longest_ping(tmp_path: Path) -> None:
    link = read_given_link(
        write(tmp_path, measured(1, 0, 5e8, ping=2e-3), measured(0, 2, 2.4e6), measured(2, 0, 3e6))
    ).link
    assert link.name == "node 0 -> node 2" and link.is_shared and link.origin == "measured"
    assert (link.bytes_per_second, link.latency_seconds) == (2.4e6, 1e-3)
    cluster = replace(parse_cluster("2xcpu"), nodes=2, devices=1, between=link)
    said = "link between nodes: node 0 -> node 2, 2.4 MB/s each way shared by all ranks of a node, latency 1.00 ms"
    assert any(said in line and "(measured)" in line for line in assumption_lines(cluster, precision="fp32"))


def test_a_file_whose_name_begins_with_a_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(write(tmp_path, measured(0, 1, 7e6))).rename(tmp_path / "2nodes.json")
    monkeypatch.chdir(tmp_path)
    assert read_given_link("2nodes.json").link.bytes_per_second == 7e6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("20", "has no unit"),
        ("20 parsec", "not a unit of bytes per second"),
        ("20mb/s", "did you mean '20Mbit/s', or '20MB/s'?"),
        ("20MBPS", "did you mean '20Mbit/s', or '20MB/s'?"),
        ("20M", "did you mean '20Mbit/s', or '20MB/s'?"),
        ("eth-9g", "no rate with a unit, no file, and none of"),
        ("-1 Mbit/s", "not positive"),
    ],
)
def test_what_is_no_link(text: str, says: str) -> None:
    with pytest.raises(PacelineError) as caught:
        read_given_link(text)
    assert says in str(caught.value) and "--link" in str(caught.value)


def test_files_that_are_no_measurement(tmp_path: Path) -> None:
    for content, says in (
        ("{", "is not the output"),
        ('{"ok": true}', "is not the output"),
        ('{"links": []}', "has no links"),
    ):
        path = tmp_path / "links.json"
        path.write_text(content)
        with pytest.raises(PacelineError, match=says):
            read_given_link(str(path))
    broken = write(tmp_path, measured(0, 1, 5e8), measured(1, 0, 0.0, problem="no answer to a connection"))
    with pytest.raises(PacelineError, match="node 1 -> node 0 does not work: no answer to a connection"):
        read_given_link(broken)
