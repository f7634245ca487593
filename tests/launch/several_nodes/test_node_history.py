"""The lines of `why` about the nodes of earlier attempts, from the files of a run."""

from pathlib import Path
from typing import Any

from paceline.filesystem.atomic_files import write_json
from paceline.launch.several_nodes.node_history import describe_attempt_ends
from paceline.launch.several_nodes.node_stays import NodeStay, NodeStays
from paceline.run_folder.run_folder import RunFolder


def write_nodes(run: Path, *attempts: tuple[int, ...]) -> None:
    """Write `nodes.json` with these nodes in attempt 1, 2 and so on."""
    stays = NodeStays()
    for number, nodes in enumerate(attempts, 1):
        some = [
            NodeStay.begin(node, host=f"host{node}", address="", ranks=range(2 * node, 2 * node + 2)) for node in nodes
        ]
        stays.begin_attempt(run, number, some)


def started(attempt: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": "RunStarted", "attempt": attempt, "time": time, **fields}


def step_done(step: int, time: float) -> dict[str, Any]:
    return {"event": "StepDone", "step": step, "time": time}


def test_a_head_that_no_node_outlived_is_told_from_what_it_logged(tmp_path: Path) -> None:
    write_nodes(tmp_path, (0, 1), (0, 1))
    events = [started(1, 10.0), step_done(10, 12.0), step_done(20, 14.0), started(2, 44.5, resumed_from=18)]
    assert describe_attempt_ends(RunFolder(tmp_path), events, restarts={}) == [
        "attempt 1: node 0 (host0, ranks 0-1) is gone: its agent ended without a message; last logged step 20; "
        "started again from step 18 (disk) after 30.5 s"
    ]


def test_losses_and_changes_are_in_the_order_of_time(tmp_path: Path) -> None:
    write_nodes(tmp_path, (0, 1, 2), (0, 1), (0, 1), (0, 1, 2))
    lost = {"rank": 0, "kind": "node", "message": "node 0 (host0, ranks 0-1) is gone: nothing for 30 s; last step 7"}
    attempt = RunFolder(tmp_path).attempt_folder(2)
    attempt.mkdir(parents=True)
    write_json(attempt / "first-failure.json", lost)
    end = {"event": "RunEnded", "status": "stopped", "step": 9, "time": 50.0}
    events = [started(1, 1.0), started(2, 2.0), started(3, 40.0), end, started(4, 52.0)]
    restart = "attempt 1: node 2 is gone; restarted in 1.00 s from step 6 (memory); 2 steps repeated"
    lines = describe_attempt_ends(RunFolder(tmp_path), events, restarts={1: restart})
    assert lines == [
        f"{restart}; continued on 2 nodes and 4 ranks, without node 2 (host2)",
        f"attempt 2: {lost['message']}; started again from the first step",
        "attempt 3: node 2 (host2, ranks 4-5) came at step 9 after 2.0 s; "
        "continued on 3 nodes and 6 ranks, with node 2 (host2)",
    ]


def test_a_run_that_was_stopped_and_resumed_on_the_same_nodes_has_lost_nothing(tmp_path: Path) -> None:
    write_nodes(tmp_path, (0, 1), (0, 1))
    end = {"event": "RunEnded", "status": "stopped", "step": 9, "time": 5.0}
    assert describe_attempt_ends(RunFolder(tmp_path), [started(1, 1.0), end, started(2, 9.0)], restarts={}) == []
    assert describe_attempt_ends(RunFolder(tmp_path), [], restarts={}) == []
