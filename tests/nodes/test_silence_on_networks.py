"""A cut of the network that is shorter than the patience: both ends of a link hear each other again in time."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.nodes.network_nodes import NetworkNodes, can_make_nodes, network_nodes

pytestmark = [
    pytest.mark.one_worker,
    pytest.mark.skipif(not can_make_nodes(), reason="network namespaces need root: test_node_link.py plays a cut"),
]
CUT_SECONDS = 8.0
PORT = 29791
END = """
import json, sys, time
from paceline.nodes.head_connection import join_head
from paceline.nodes.node_link import NodeLink
from paceline.nodes.node_meeting import Reception, listen_as_head
from paceline.nodes.node_place import NodePlace

node, port, seconds = map(int, sys.argv[1:])
place = NodePlace(num_nodes=2, head_host="node0", port=port, node=node)
if node == 0:
    reception = Reception(listen_as_head(place), place)
    seats, _ = reception.wait(wait_seconds=30, report=print)
    link = NodeLink(seats[1].channel)
else:
    link = NodeLink(join_head(place, wait_seconds=30))
print("met", flush=True)
longest, end_time = 0.0, time.monotonic() + seconds
while time.monotonic() < end_time:
    longest = max(longest, link.silence_seconds)
    time.sleep(0.05)
print(json.dumps({"longest": longest, "now": link.silence_seconds, "loss": link.loss}), flush=True)
time.sleep(60)  # until both have measured
"""


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkNodes]:
    with network_nodes(2, tmp_path_factory.mktemp("silence")) as made:
        yield made


def test_a_cut_makes_neither_end_silent_for_much_longer_than_it_lasts(nodes: NetworkNodes) -> None:
    """TCP alone would repeat what was lost up to 8 s after the end of a cut of 8 s."""
    ends: list[subprocess.Popen[str]] = []
    for node in range(2):
        ends.append(nodes.start(node, [sys.executable, "-c", END, str(node), str(PORT), "24"]))
    for end in ends:
        assert end.stdout is not None and end.stdout.readline() == "met\n"
    time.sleep(3)
    nodes.cut(1)
    time.sleep(CUT_SECONDS)
    nodes.mend(1)
    measured = []
    for end in ends:
        assert end.stdout is not None
        measured.append(json.loads(end.stdout.readline()))
    for end in ends:
        end.kill()
        end.communicate()
    for each in measured:
        assert CUT_SECONDS - 1 < each["longest"] < CUT_SECONDS + 3.5 and each["now"] < 2 and not each["loss"], measured
