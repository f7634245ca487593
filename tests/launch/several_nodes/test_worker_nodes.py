"""Which losses a run with parameter servers survives, and what the head says about them."""

from pathlib import Path

import pytest

from paceline.launch.failures.failure_record import FORKSERVER_RANK, LOST_NODE, Failure, failure_path
from paceline.launch.several_nodes import worker_nodes
from paceline.launch.several_nodes.attempt_part import AttemptPart
from paceline.launch.several_nodes.attempt_progress import AttemptProgress, PartResult
from paceline.launch.several_nodes.lost_nodes import LOST_NODES, LOST_WORK, LostWork
from paceline.launch.several_nodes.worker_nodes import WorkerNodes
from paceline.run_folder.run_folder import RunFolder

GONE = Failure(rank=4, kind=LOST_NODE, message="node 2 (host2, ranks 4-5) is gone: nothing for 30 s")
KILLED = Failure(rank=4, kind="signal", message="SIGKILL", step=7)
NO_NETWORK = Failure(rank=4, kind="MachineError", message="connection closed by the server")
STARTER = Failure(rank=FORKSERVER_RANK, kind="signal", message="SIGKILL")
BUG = Failure(rank=4, kind="ValueError", message="only here", step=7)
NAME = "node 2 (host2, ranks 4-5)"


def result(failure: Failure | None = None, *, code: int | None = None) -> PartResult:
    exit_code = (0 if failure is None else 1) if code is None else code
    return PartResult(exit_code=exit_code, failure=failure, progress=AttemptProgress())


def begun(folder: Path, *, servers: int = 2, ranks_per_node: int = 2) -> WorkerNodes:
    workers = WorkerNodes(ranks_per_node=ranks_per_node)
    workers.begin_attempt(folder, {"servers": servers})
    return workers


def spare(workers: WorkerNodes, end: PartResult, *, node: int = 2, running: tuple[int, ...] = (1, 3)) -> bool:
    return workers.spare(node, end, name=NAME, running=running, silence=30.0)


@pytest.mark.parametrize("failure", [GONE, KILLED, NO_NETWORK, STARTER])
def test_workers_may_be_lost_with_their_node_or_their_processes(tmp_path: Path, failure: Failure) -> None:
    workers = begun(tmp_path)
    assert spare(workers, result(failure)) and not workers.counts(2) and workers.counts(1)


@pytest.mark.parametrize("end", [result(BUG), result(), result(code=75), result(code=130), result(code=1)])
def test_an_error_of_the_job_and_a_normal_end_count(tmp_path: Path, end: PartResult) -> None:
    workers = begun(tmp_path)
    assert not spare(workers, end) and workers.counts(2)


@pytest.mark.parametrize(
    ("servers", "ranks_per_node", "node", "running", "is_spared"),
    [
        (2, 2, 2, (), False),  # no worker is left
        (2, 4, 2, (), True),  # node 0 has two
        (4, 2, 1, (2, 3), False),  # servers fill nodes 0 and 1
        (4, 2, 2, (1,), False),  # which have no worker
        (0, 2, 2, (1, 3), False),  # synchronous training
    ],
)
def test_a_server_and_the_last_worker_can_not_be_lost(
    tmp_path: Path, servers: int, ranks_per_node: int, node: int, running: tuple[int, ...], is_spared: bool
) -> None:
    workers = begun(tmp_path, servers=servers, ranks_per_node=ranks_per_node)
    assert spare(workers, result(GONE), node=node, running=running) is is_spared


def test_nothing_is_spared_once_the_attempt_is_being_ended(tmp_path: Path) -> None:
    workers = begun(tmp_path)
    workers.has_stopped = True
    assert not spare(workers, result(GONE)) and LOST_NODES.read(tmp_path) == []


def test_the_screen_and_the_server_hear_of_a_loss_and_the_end_of_the_run_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = begun(tmp_path)
    spare(workers, result(GONE))
    spare(workers, result(KILLED), node=3, running=(1,))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(f"{NAME} is gone: nothing for 30 s; last step 0; the run continues with 4 workers")
    assert "has no workers any more: rank 4 killed by SIGKILL at step 7; last step 0; " in lines[1]
    assert lines[1].endswith("the run continues with 2 workers")
    first, second = LOST_NODES.read(tmp_path)
    assert (first.node, first.first_rank, first.num_ranks, first.silent_seconds) == (2, 4, 2, 30.0)
    assert (second.node, second.first_rank) == (3, 6)
    LOST_WORK.write(tmp_path, [LostWork(gradients=2, samples=16)])
    told = workers.loss_lines()
    start = f"went on without {NAME} from step 0: "
    assert told == [
        f"{start}nothing for 30 s; 2 unpushed gradients (16 samples) are lost, and other workers compute them again",
        f"{start}rank 4 killed by SIGKILL at step 7; what its workers were computing is not known",
    ]
    workers.begin_attempt(tmp_path / "next", {"servers": 2})
    assert workers.loss_lines() == told


def test_a_node_in_the_place_of_a_lost_one_starts_only_in_an_attempt_that_goes_on(tmp_path: Path) -> None:
    workers = begun(tmp_path)
    assert not workers.welcome(2)
    spare(workers, result(GONE))
    assert workers.welcome(2) and workers.counts(2) and not workers.welcome(2)
    assert "from step 0 to step 0" in workers.loss_lines()[0]
    spare(workers, result(GONE))
    workers.has_stopped = True
    assert not workers.welcome(2)


def test_workers_that_outlive_the_servers_are_ended_and_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_nodes, "_OVERDUE_SECONDS", 0.0)
    workers = begun(tmp_path, servers=4)
    assert not workers.watch_servers(result(), {2: result()})  # node 1 has servers, too
    assert not workers.watch_servers(result(), {1: result(KILLED)})
    assert not workers.watch_servers(result(code=1), {1: result()})
    assert workers.watch_servers(result(code=75), {1: result(code=75)})
    assert spare(workers, result(code=1), running=()) and spare(workers, result(BUG), node=3, running=())
    assert workers.loss_lines() == []
    assert not begun(tmp_path, servers=0).watch_servers(result(), {1: result()})


def test_a_failure_record_of_a_lost_node_says_nothing_about_the_one_in_its_place(tmp_path: Path) -> None:
    """Its workers may have written it while nobody could reach them."""
    folder = RunFolder(tmp_path).attempt_folder(1)
    folder.mkdir(parents=True)
    for rank in (1, 2):
        failure_path(folder, rank).write_text("{}")
    part = AttemptPart(ranks=range(2, 4), node=1)
    part.write_request(RunFolder(tmp_path), 1, {"payload": {}})
    assert failure_path(folder, 1).exists() and not failure_path(folder, 2).exists()


def test_of_the_lost_nodes_servers_are_needed_and_one_node_with_workers(tmp_path: Path) -> None:
    workers = begun(tmp_path, servers=4)
    assert workers.needed([1, 3], present=[2]) == [1]
    assert workers.needed([3], present=[1, 2]) == []
    assert workers.needed([2, 3], present=[1]) == [2, 3]
    assert begun(tmp_path, servers=0).needed([2], present=[1]) == [2]
