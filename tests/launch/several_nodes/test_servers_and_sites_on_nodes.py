"""Update rules whose ranks do not all wait for each other, on several nodes: parameter servers, and sites as nodes."""

import json
import os
import signal
from pathlib import Path

import pytest

from paceline.launch.several_nodes.node_stays import NodeStay, read_node_stays
from tests.conftest import Shop
from tests.launch.several_nodes.own_nodes import OwnNodes, rank_pid, wait_for_step
from tests.waiting import wait_until

WHOLE_BATCHES = ("--job.samples", "48", "--train.threads", "1", "--watch.to", "console,jsonl")
SLOW = {"PAUSE": "0.02"}


def nodes_of(shop: Shop, *words: str, count: int, steps: int = 40) -> OwnNodes:
    return OwnNodes(shop, count, ("--run-dir", "many", "--train.steps", str(steps), *WHOLE_BATCHES, *words))


def digest_of_one_machine(shop: Shop, *words: str, ranks: int, steps: int = 40) -> str:
    one = shop.train("one", *WHOLE_BATCHES, *words, ranks=ranks, steps=steps)
    assert one.code == 0, one.err
    return shop.digest("one")


def notes(run: Path) -> list[str]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["event"] == "Note"]


def kill_node(nodes: OwnNodes, node: int) -> None:
    os.kill(nodes.processes[node].pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("update", "count", "per_node", "layout"),
    [
        ("local,every=3", 2, 1, "ddp"),
        ("diloco,every=4,delay=1", 2, 2, "dp_replicate=2,dp_shard=2"),  # a site is a node, with an FSDP group inside
    ],
)
def test_sites_may_be_nodes(shop: Shop, update: str, count: int, per_node: int, layout: str) -> None:
    words = ("--update", update, "--layout", layout)
    nodes = nodes_of(shop, *words, "--ranks-per-node", str(per_node), count=count, steps=13)
    nodes.start_all()
    ends = nodes.ends()
    assert [end.code for end in ends] == [0] * count, [end.screen for end in ends]
    assert shop.digest("many") == digest_of_one_machine(shop, *words, ranks=count * per_node, steps=13)


def test_a_workers_node_is_killed_and_the_weights_are_those_of_one_machine(shop: Shop) -> None:
    """Node 0 has the two servers, and one of three nodes with workers is killed. The lost shares are computed again."""
    rule = ("--update", "ps,servers=2,staleness=0")
    nodes = nodes_of(shop, *rule, "--ranks-per-node", "2", count=4)
    nodes.start_all(environ=SLOW)
    run = shop.path / "many"
    wait_for_step(run, 8)
    lost_pids = [rank_pid(run, rank) for rank in (4, 5)]
    kill_node(nodes, 2)
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0, -9, 0], [end.screen for end in ends]
    screen = ends[0].screen
    assert "ranks 4-5) is gone: its agent has ended" in screen and "the run continues with 4 workers" in screen, screen
    assert "went on without node 2 (" in ends[0].out.splitlines()[-2], screen
    [note] = [note for note in notes(run) if "is lost after step" in note]
    assert note.startswith("node 2 (") and note.endswith("; 4 workers left"), note
    told = note.partition(": ")[2].rpartition("; ")[0]
    assert ("unpushed gradient" in told or "nothing is lost" in told) and told in ends[0].out.splitlines()[-2], (
        told,
        screen,
    )
    assert not (run / "logs/attempt-2").exists()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in lost_pids), seconds=10)
    assert shop.digest("many") == digest_of_one_machine(shop, *rule, ranks=8)


def test_a_worker_that_is_killed_on_another_node_is_restarted_there_alone(shop: Shop) -> None:
    rule = ("--update", "ps,staleness=0")
    nodes = nodes_of(shop, *rule, "--ranks-per-node", "2", "--faults", "kill rank=3 step=5", count=2)
    nodes.start_all(environ=SLOW)
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    run = shop.path / "many"
    assert "the worker of rank 3 has restarted" in notes(run) and not (run / "logs/attempt-2").exists()
    assert "went on without" not in ends[0].screen
    assert shop.digest("many") == digest_of_one_machine(shop, *rule, ranks=4)


def test_a_node_that_comes_again_joins_the_run_while_it_goes_on(shop: Shop) -> None:
    rule = ("--update", "ps,staleness=0", "--nodes.restarts", "1")
    nodes = nodes_of(shop, *rule, count=3, steps=150)
    nodes.start_all(environ=SLOW)
    run = shop.path / "many"
    wait_for_step(run, 8)
    kill_node(nodes, 2)
    nodes.end(2)
    nodes.start(2, environ=SLOW)
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0, 0], [end.screen for end in ends]
    screen = ends[0].screen
    assert "node 2 may come again, or another one instead" in screen and "takes the place of the lost one" in screen
    assert "the worker of rank 2 has restarted" in notes(run) and not (run / "logs/attempt-2").exists()
    last = ends[0].out.splitlines()[-2]
    start, end = last.partition(" from step ")[2].partition(":")[0].split(" to step ")
    assert "went on without node 2 (" in last and 8 <= int(start) < int(end) < 150, last
    assert shop.digest("many") == digest_of_one_machine(shop, "--update", "ps,staleness=0", ranks=3, steps=150)


def test_why_report_and_the_run_folder_tell_which_nodes_were_there(shop: Shop) -> None:
    """While a node is lost, after another one has taken its place, and after the end."""
    nodes = nodes_of(shop, "--update", "ps,staleness=0", "--nodes.restarts", "1", count=3, steps=5000)
    nodes.start_all(environ=SLOW)
    run = shop.path / "many"
    wait_for_step(run, 8)
    kill_node(nodes, 2)
    nodes.end(2)
    wait_until(lambda: any(stay.left_at for stay in stays(run)), seconds=60)
    told = shop.run("why", "many").out
    assert "many: running, attempt 1" in told and "node 2 (" in told and "its agent has ended" in told, told
    assert "ranks 1-2: on other nodes" in told and "no hang is looked for" in told and "no rank hangs" not in told, told
    nodes.start(2, environ=SLOW)
    wait_until(lambda: len(stays(run)) == 4, seconds=60)
    nodes.processes[0].send_signal(signal.SIGTERM)
    ends = nodes.ends()
    assert [end.code for end in ends] == [75, 75, 75], [end.screen for end in ends]
    told = shop.run("why", "many").out
    assert "many: stopped" in told and "in its place since" in told, told
    assert [(stay.node, stay.first_rank, stay.address, bool(stay.left_at)) for stay in stays(run)] == [
        (0, 0, "127.0.0.1", False), (1, 1, "127.0.0.1", False), (2, 2, "127.0.0.1", True), (2, 2, "127.0.0.1", False),
    ]  # fmt: skip
    assert "its agent has ended" in stays(run)[2].reason
    assert shop.run("report", "many").code == 0
    page = (run / "report.html").read_text()
    for section in ("Nodes", "Failures"):
        text = page.partition(f"<h2>{section}</h2>")[2].partition("<h2>")[0]
        assert text.count("its agent has ended, or the connection to it was lost") == 1, (section, text)
    assert f"<td>nodes</td><td>{nodes.option}</td>" in page


def stays(run: Path) -> list[NodeStay]:
    """Return the nodes of the only attempt."""
    attempts = read_node_stays(run)
    return attempts[-1].nodes if attempts else []


def test_a_server_is_restarted_without_the_node_that_was_lost_before(shop: Shop) -> None:
    rule = ("--update", "ps,staleness=0", "--checkpoint.every", "5")
    nodes = nodes_of(shop, *rule, "--faults", "kill rank=0 step=30", count=3)
    nodes.start_all(environ=SLOW)
    wait_for_step(shop.path / "many", 8)
    kill_node(nodes, 1)
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, -9, 0], [end.screen for end in ends]
    assert ends[0].screen.count("went on without node 1 (") == 1 and "rank 0 on " in ends[0].screen, ends[0].screen
    assert (shop.path / "many/logs/attempt-2").exists()
    assert shop.digest("many") == digest_of_one_machine(shop, "--update", "ps,staleness=0", ranks=3)


@pytest.mark.parametrize(("update", "count", "lost"), [("ps", 2, 0), ("ps,servers=2", 3, 1), ("ps", 2, 1)])
def test_servers_or_all_workers_are_lost_with_their_node_and_the_run_is_resumed(
    shop: Shop, update: str, count: int, lost: int
) -> None:
    words = ("--update", f"{update},staleness=0")
    nodes = nodes_of(shop, *words, "--checkpoint.every", "5", count=count)
    nodes.start_all(environ=SLOW)
    wait_for_step(shop.path / "many", 8)
    kill_node(nodes, lost)
    ends = nodes.ends()
    expected = [-9 if node == lost else 75 for node in range(count)]
    assert [end.code for end in ends] == expected, [end.screen for end in ends]
    assert all(f"node {lost} (" in ends[node].screen for node in range(count) if node != lost)
    nodes.start_all()
    ends = nodes.ends()
    assert [end.code for end in ends] == [0] * count, [end.screen for end in ends]
    assert shop.digest("many") == digest_of_one_machine(shop, *words, ranks=count)


def test_after_the_loss_of_all_workers_one_node_is_enough_to_continue(shop: Shop) -> None:
    rule = ("--update", "ps,staleness=0", "--checkpoint.every", "5", "--nodes.restarts", "3")
    nodes = nodes_of(shop, *rule, count=3, steps=60)
    nodes.start_all(environ=SLOW)
    wait_for_step(shop.path / "many", 8)
    for node in (1, 2):
        kill_node(nodes, node)
        nodes.end(node)
    nodes.start(2)
    head, member = nodes.end(0), nodes.end(2)
    assert [head.code, member.code] == [0, 0], head.screen + member.screen
    assert "waiting for a node in its place (restart 1 of 3)" in head.screen, head.screen
    assert shop.digest("many") == digest_of_one_machine(shop, "--update", "ps,staleness=0", ranks=3, steps=60)


def test_a_stop_signal_to_a_workers_node_saves_and_stops_all(shop: Shop) -> None:
    nodes = nodes_of(shop, "--update", "ps,staleness=2", count=3, steps=2000)
    nodes.start_all(environ=SLOW)
    wait_for_step(shop.path / "many", 5)
    nodes.processes[1].send_signal(signal.SIGTERM)
    ends = nodes.ends()
    assert [end.code for end in ends] == [75, 75, 75], [end.screen for end in ends]
    assert "Stopped and saved. Resume: on every node: paceline train job.py" in ends[0].screen, ends[0].screen
    assert "went on without" not in ends[0].screen


def test_an_error_of_a_worker_on_another_node_ends_the_run(shop: Shop) -> None:
    job = (shop.path / "job.py").read_text()
    line = "    kept = batch[-1] != 3\n    return F"
    assert line in job
    shop.write(
        "broken.py", job.replace(line, f"    if os.environ['RANK'] == '2': raise ValueError('only here')\n{line}")
    )
    nodes = nodes_of(shop, "--update", "ps", "--ranks-per-node", "2", count=3, steps=2000)  # other workers may be fast
    for node in range(3):
        nodes.start(node, job="broken.py", environ=SLOW)
    ends = nodes.ends()
    assert [end.code for end in ends] == [1, 1, 1], [end.screen for end in ends]
    assert not any("was killed again" in end.screen for end in ends), [end.screen for end in ends]
    assert "First error: rank 2 on " in ends[0].screen and "ValueError: only here" in ends[0].screen, ends[0].screen
    assert "the run continues" not in ends[0].screen


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--update", "hogwild"), "its workers share the memory of one machine"),
        (("--update", "hogwild"), "on one machine, --ranks 4 --update hogwild"),
        (("--update", "ps,servers=3"), "node 1 would have servers and workers"),
        (("--update", "ps,servers=3"), "--update ps,servers=4, or --ranks-per-node 3"),
    ],
)
def test_what_does_not_fit_nodes_is_refused_at_once(shop: Shop, words: tuple[str, ...], says: str) -> None:
    nodes = ("--nodes", "2:127.0.0.1:1", "--node", "1", "--ranks-per-node", "2")
    done = shop.run("train", "job.py", "--dry-run", *nodes, *words)
    assert done.code == 2 and says in done.err + done.out, done.err + done.out
