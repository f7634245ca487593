"""Which run a job of a scheduler continues when it is started again."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.launch.requeued_run import RECORD, SchedulerJob, detect_scheduler_jobs, find_or_create_run

SLURM = {"SLURM_JOB_ID": "77"}
REQUEUED = {**SLURM, "SLURM_RESTART_COUNT": "1"}


def chosen(root: Path, environ: dict[str, str], *, launcher: str = "12-345", name: str = "job", lr: str = "0.1") -> str:
    jobs = detect_scheduler_jobs(environ, launcher_id=launcher)
    return find_or_create_run(name, jobs, request={"settings": {"job.lr": lr}}, root=root).path.name


def torchrun(restarts: int = 0, *, run_id: str = "none", **more: str) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restarts), **more}


def test_outside_of_a_scheduler_each_start_is_a_new_run(tmp_path: Path) -> None:
    assert detect_scheduler_jobs({"HOME": "/root"}, launcher_id="1-2") == ()
    assert chosen(tmp_path, {}) != chosen(tmp_path, {})
    assert not list(tmp_path.rglob(RECORD))


def test_a_requeued_job_finds_its_run(tmp_path: Path) -> None:
    first = chosen(tmp_path, SLURM)
    assert chosen(tmp_path, REQUEUED) == first
    assert chosen(tmp_path, {**REQUEUED, "SLURM_RESTART_COUNT": "2"}) == first


def test_commands_of_one_script_keep_their_order(tmp_path: Path) -> None:
    """Also in an interactive allocation, where each command is a run of its own."""
    runs = [chosen(tmp_path, SLURM) for _ in range(3)]
    assert len(set(runs)) == 3
    assert [chosen(tmp_path, REQUEUED) for _ in range(3)] == runs
    assert chosen(tmp_path, REQUEUED) not in runs, "a fourth command is new"


def test_another_job_and_another_name_find_nothing(tmp_path: Path) -> None:
    first = chosen(tmp_path, SLURM)
    assert chosen(tmp_path, {**REQUEUED, "SLURM_JOB_ID": "78"}) != first
    assert chosen(tmp_path, REQUEUED, name="other") != first


@pytest.mark.parametrize("run_id", ["none", "a1b2"])
def test_the_restart_of_a_torchrun_finds_its_run(tmp_path: Path, run_id: str) -> None:
    first = chosen(tmp_path, torchrun(run_id=run_id))
    assert [chosen(tmp_path, torchrun(n, run_id=run_id)) for n in (1, 2, 5)] == [first] * 3


def test_two_torchruns_in_one_job_are_two_runs(tmp_path: Path) -> None:
    """The second restarts, and does not continue the first, which ended before it began."""
    first = chosen(tmp_path, torchrun(**SLURM), launcher="10-1")
    second = chosen(tmp_path, torchrun(**SLURM), launcher="20-2")
    assert first != second
    assert chosen(tmp_path, torchrun(1, **SLURM), launcher="20-2") == second
    # After a requeue both torchruns are new processes.
    assert chosen(tmp_path, torchrun(**REQUEUED), launcher="30-3") == first
    assert chosen(tmp_path, torchrun(1, **REQUEUED), launcher="30-3") == first
    assert chosen(tmp_path, torchrun(**REQUEUED), launcher="40-4") == second


def test_torchruns_that_share_an_id_are_two_runs(tmp_path: Path) -> None:
    """As with `--rdzv-id 100` in a script that is run every day."""
    yesterday = chosen(tmp_path, torchrun(run_id="100"), launcher="10-1")
    today = chosen(tmp_path, torchrun(run_id="100"), launcher="20-2")
    assert chosen(tmp_path, torchrun(1, run_id="100"), launcher="20-2") == today != yesterday


def test_a_command_with_other_settings_is_another_run(tmp_path: Path) -> None:
    """A sweep in one job: the requeued commands may come in another order."""
    runs = {lr: chosen(tmp_path, SLURM, lr=lr) for lr in ("0.1", "0.2", "0.3")}
    assert {lr: chosen(tmp_path, REQUEUED, lr=lr) for lr in ("0.3", "0.1", "0.2")} == runs


def test_commands_at_the_same_time_choose_different_runs(tmp_path: Path) -> None:
    runs = [chosen(tmp_path, SLURM) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: chosen(tmp_path, REQUEUED), range(4)))
    assert sorted(found) == sorted(runs)


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    first = chosen(tmp_path, SLURM)
    (tmp_path / "job" / first / RECORD).write_text("[{")
    assert chosen(tmp_path, REQUEUED) != first


def test_a_start_continues_only_an_earlier_one() -> None:
    starts = [SchedulerJob(scheduler="slurm", job_id="7", start_number=number) for number in (1, 2)]
    assert starts[1].continues(starts[0])
    assert not starts[0].continues(starts[1]) and not starts[0].continues(starts[0])
