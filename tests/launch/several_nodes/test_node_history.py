"""The lines of `why` about the nodes of earlier attempts, from the files of a run."""

from pathlib import Path
from typing import Any

from paceline.filesystem.atomic_files import write_json
from paceline.launch.several_nodes.node_history import HeadLoss, describe_attempt_ends, find_head_losses
from paceline.launch.several_nodes.node_stays import NodeStay, NodeStays, read_node_stays
from paceline.run_folder.run_folder import RunFolder


def write_nodes(run: Path, *attempts: tuple[int, ...]) -> None:
    """Write `nodes.json` with these nodes in attempt 1, 2 and so on."""
    stays = NodeStays()
    for number, nodes in enumerate(attempts, 1):
        some = [
            NodeStay.begin(node, host=f"host{node}", address="", ranks=range(2 * node, 2 * node + 2)) for node in nodes
        ]
        stays.begin_attempt(run, number, some)


def attempt_ends(run: Path, events: list[dict[str, Any]], **lines: Any) -> list[str]:
    return list(describe_attempt_ends(RunFolder(run), events, **{"restarts": {}, "failures": {}, **lines}).values())


def started(attempt: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": "RunStarted", "attempt": attempt, "time": time, **fields}


def step_done(step: int, time: float) -> dict[str, Any]:
    return {"event": "StepDone", "step": step, "time": time}


def test_a_head_that_no_node_outlived_is_told_from_what_it_logged(tmp_path: Path) -> None:
    write_nodes(tmp_path, (0, 1), (0, 1))
    events = [started(1, 10.0), step_done(10, 12.0), step_done(20, 14.0), started(2, 44.5, resumed_from=18)]
    assert attempt_ends(tmp_path, events) == [
        "attempt 1: node 0 (host0, ranks 0-1) is gone: its agent ended without a message; last logged step 20; "
        "started again from step 18 (disk) after 30.5 s"
    ]
    lost = HeadLoss(reason="its agent ended without a message", time=14.0)
    assert find_head_losses(RunFolder(tmp_path), events) == {1: lost}


def test_an_error_of_the_job_is_no_loss_of_the_head(tmp_path: Path) -> None:
    write_nodes(tmp_path, (0, 1), (0, 1), (0, 1))
    events = [started(1, 10.0), step_done(3, 12.0), started(3, 44.5)]
    failure = {"rank": 2, "kind": "ValueError", "message": "bad", "step": 4, "host": "host1"}
    folder = RunFolder(tmp_path).attempt_folder(1)
    folder.mkdir(parents=True)
    write_json(folder / "first-failure.json", failure)
    early = "attempt 2: rank 0 on host0 failed: OSError: no"
    assert attempt_ends(tmp_path, events, failures={1: "attempt 1: ?", 2: early}) == ["attempt 1: ?", early]
    assert find_head_losses(RunFolder(tmp_path), events) == {}
    (line,) = attempt_ends(tmp_path, [*events[:2], started(2, 44.5)])
    assert line == "attempt 1: rank 2 on host1 failed at step 4: ValueError: bad; started again from the first step"


def test_a_node_that_goes_after_the_next_attempt_has_begun_left_the_one_before(tmp_path: Path) -> None:
    """It was asked to stop: the others go on at once."""
    stays = NodeStays()
    both = [NodeStay.begin(node, host=f"host{node}", address="", ranks=range(node, node + 1)) for node in (0, 1)]
    stays.begin_attempt(tmp_path, 1, both)
    stays.begin_attempt(tmp_path, 2, both[:1])
    stays.leave(1, "it was asked to stop")
    first, second = read_node_stays(tmp_path)
    assert [(stay.reason, bool(stay.left_at)) for stay in first.nodes] == [("", False), ("it was asked to stop", True)]
    assert [stay.reason for stay in second.nodes] == [""]


def test_losses_and_changes_are_in_the_order_of_time(tmp_path: Path) -> None:
    write_nodes(tmp_path, (0, 1, 2), (0, 1), (0, 1), (0, 1, 2))
    lost = {"rank": 0, "kind": "node", "message": "node 0 (host0, ranks 0-1) is gone: nothing for 30 s; last step 7"}
    attempt = RunFolder(tmp_path).attempt_folder(2)
    attempt.mkdir(parents=True)
    write_json(attempt / "first-failure.json", lost)
    end = {"event": "RunEnded", "status": "stopped", "step": 9, "time": 50.0}
    events = [started(1, 1.0), started(2, 2.0), started(3, 40.0), end, started(4, 52.0)]
    restart = "attempt 1: node 2 is gone; restarted in 1.00 s from step 6 (memory); 2 steps repeated"
    lines = attempt_ends(tmp_path, events, restarts={1: restart})
    assert lines == [
        f"{restart}; continued on 2 nodes and 4 ranks, without node 2 (host2)",
        f"attempt 2: {lost['message']}; started again from the first step",
        "attempt 3: node 2 (host2, ranks 4-5) came at step 9 after 2.0 s; "
        "continued on 3 nodes and 6 ranks, with node 2 (host2)",
    ]


def test_a_run_that_was_stopped_and_resumed_on_the_same_nodes_has_lost_nothing(tmp_path: Path) -> None:
    write_nodes(tmp_path, (0, 1), (0, 1))
    end = {"event": "RunEnded", "status": "stopped", "step": 9, "time": 5.0}
    assert attempt_ends(tmp_path, [started(1, 1.0), end, started(2, 9.0)]) == []
    assert attempt_ends(tmp_path, []) == []
