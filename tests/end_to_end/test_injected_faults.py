"""`--faults`: each kind does what the documentation says, and one that did not happen is an error."""

import json
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import SMALL_JOB, Shop

WORDS = ("--train.micro_batch_size", "3", "--survive.restarts", "0", "--checkpoint.every", "4", "--log.every", "1")


def losses(shop: Shop, run: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (shop.path / run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_loss_that_is_not_finite_names_its_rank(shop: Shop) -> None:
    ended = shop.train("run", *WORDS, "--faults", "nan rank=1 step=6")
    assert ended.code == 1 and ended.err.startswith("FAILED at step 6. First error: rank 1, NonFiniteError"), ended.text
    skipped = shop.train("skipped", *WORDS, "--train.on_nonfinite", "skip", "--faults", "nan rank=1 step=6")
    assert skipped.code == 0 and "step 6" in skipped.out, skipped.text


def test_a_loss_that_is_nan_only_once_changes_nothing(shop: Shop) -> None:
    """As after a hardware error: the step is computed again."""
    words = (*WORDS, "--survive.restarts", "3")
    assert shop.train("whole", *words).code == 0
    ended = shop.train("run", *words, "--faults", "nan rank=1 step=6")
    assert ended.code == 0 and "NonFiniteError" in ended.out and "restarted in" in ended.out, ended.text
    assert shop.digest("run") == shop.digest("whole")


def test_a_loss_that_is_nan_again_ends_the_run(shop: Shop) -> None:
    faults = "nan rank=1 step=6; nan rank=1 step=6 attempt=2; nan rank=1 step=6 attempt=3"
    ended = shop.train("run", *WORDS, "--survive.restarts", "3", "--faults", faults)
    assert ended.code == 1 and ended.err.startswith("FAILED at step 6. First error: rank 1, NonFiniteError"), ended.text
    assert "the same error at step 6 ended the attempt before" in ended.err, ended.err
    assert sorted(path.name for path in (shop.path / "run" / "logs").iterdir()) == ["attempt-1", "attempt-2"]


def test_a_spike_is_one_step_high(shop: Shop) -> None:
    ended = shop.train("run", *WORDS, "--faults", "spike rank=0 step=6")
    assert ended.code == 0, ended.text
    found = losses(shop, "run")
    assert found[6] > 1000 * found[5] and found[7] < 100 * found[5]


def test_a_spike_waits_for_a_training_microbatch(shop: Shop) -> None:
    """Rank 1 has no microbatch in step 5, the short last batch of the epoch; the evaluation after it is no step."""
    ended = shop.train("run", *WORDS, "--eval.every", "5", "--faults", "spike rank=1 step=5")
    assert ended.code == 0, ended.text
    events = [json.loads(line) for line in (shop.path / "run" / "events.jsonl").read_text().splitlines()]
    (evaluated,) = [event for event in events if event["event"] == "EvalDone" and event["step"] == 5]
    found = losses(shop, "run")
    assert evaluated["metrics"]["loss"] < 100 and found[5] < 100 and found[6] > 1000


def test_a_corrupt_weight_is_found_and_its_rank_named(shop: Shop) -> None:
    ended = shop.train("run", *WORDS, "--train.check_every", "2", "--faults", "corrupt rank=1 step=5")
    assert ended.code == 1 and "DesyncError" in ended.err and "rank 1" in ended.err, ended.text


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_disk_that_is_full_in_one_save_only_leaves_out_this_save(shop: Shop, background: str) -> None:
    words = (*WORDS, "--checkpoint.background", background)
    assert shop.train("whole", *words).code == 0
    ended = shop.train("run", *words, "--faults", "disk_full rank=0 step=8")
    assert ended.code == 0, ended.text
    text = " ".join(ended.text.split())
    assert "a checkpoint could not be saved: " in text and "next save tries again" in text, ended.text
    assert "The newest checkpoint on disk is step-00000004" in text
    saved = sorted(path.name for path in (shop.path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000010", "step-00000012"], "step 10 was the best"
    assert shop.digest("run") == shop.digest("whole")


def test_a_full_disk_after_a_restart_from_memory_only_leaves_out_the_save(shop: Shop) -> None:
    words = (*WORDS, "--survive.restarts", "3", "--checkpoint.memory_every", "1", "--eval.every", "100")
    ended = shop.train("run", *words, "--faults", "kill rank=1 step=7; disk_full rank=0 step=8 attempt=2")
    assert ended.code == 0 and "(memory)" in ended.text, ended.text
    assert "The newest checkpoint on disk is step-00000004" in " ".join(ended.text.split()), ended.text
    saved = sorted(path.name for path in (shop.path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000012"]


@pytest.mark.parametrize("step", [4, 12])
def test_a_disk_that_is_full_in_the_first_or_the_last_save_ends_the_run(shop: Shop, step: int) -> None:
    ended = shop.train("run", *WORDS, "--faults", f"disk_full rank=0 step={step}")
    assert ended.code == 3, ended.text
    assert "SaveError" in ended.err.splitlines()[0] and f"step {step}" in ended.err, ended.err
    latest = shop.path / "run" / "checkpoints" / "latest"
    assert not latest.exists() if step == 4 else latest.read_text().strip() == "step-00000010"
    assert shop.train("run", *WORDS).code == 0


def test_a_node_that_is_killed_leaves_nothing_and_the_same_command_resumes(shop: Shop) -> None:
    words = (*WORDS, "--survive.restarts", "3")
    assert shop.train("whole", *words).code == 0
    killed = shop.train("run", *words, "--faults", "kill_node rank=1 step=6")
    assert killed.code == -9 and "restarted" not in killed.text, killed.text
    deadline = time.monotonic() + 10
    while (left := processes_in(shop.path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    ended = shop.train("run", *words, "--faults", "kill_node rank=1 step=6")
    assert ended.code == 0 and "resumed" in ended.out and shop.digest("run") == shop.digest("whole"), ended.text


def processes_in(folder: Path) -> list[str]:
    """The processes whose working folder is this one."""
    with_folder = [process for process in psutil.process_iter(["cwd", "cmdline"]) if process.info["cwd"] == str(folder)]
    return [" ".join(process.info["cmdline"]) for process in with_folder]


def test_a_slow_rank_only_takes_longer(shop: Shop) -> None:
    assert shop.train("whole", *WORDS).code == 0
    assert shop.train("slow", *WORDS, "--faults", "slow rank=1 step=5 seconds=0.7").code == 0
    assert shop.digest("slow") == shop.digest("whole")
    events = [json.loads(line) for line in (shop.path / "slow" / "events.jsonl").read_text().splitlines()]
    seconds = {event["step"]: event["step_seconds"] for event in events if event["event"] == "StepDone"}
    assert seconds[5] > 0.6 and seconds[6] < 0.5


@pytest.mark.parametrize("fault", [
    "kill rank=1 step=5 point=eval",  # no evaluation at step 5
    "kill rank=1 step=5 attempt=2",  # nothing makes a second attempt necessary
    "disk_full rank=1 step=8",  # under ddp, rank 0 writes
])  # fmt: skip
def test_a_fault_that_did_not_happen_is_an_error_at_the_end(shop: Shop, fault: str) -> None:
    assert shop.train("whole", *WORDS).code == 0
    ended = shop.train("run", *WORDS, "--faults", fault)
    assert ended.code == 1 and f"1 fault of --faults did not happen: {fault}." in ended.err, ended.text
    assert shop.digest("run") == shop.digest("whole"), "the training itself is complete"


def test_a_fault_of_an_attempt_that_ended_before_is_an_error_too(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB)
    ended = shop.train("run", "--faults", "kill rank=1 step=3; kill rank=0 step=4", "--checkpoint.every", "1", steps=5)
    assert ended.code == 1 and "1 fault of --faults did not happen: kill rank=0 step=4." in ended.err, ended.text
    both = "kill rank=1 step=3; kill rank=0 step=4 attempt=2"
    assert shop.train("both", "--faults", both, "--checkpoint.every", "1", steps=5).code == 0


def test_a_rank_without_a_loss_can_have_no_wrong_one(shop: Shop) -> None:
    """The first stage of a pipeline computes no loss."""
    words = (*WORDS, "--layout", "pp=2", "--place.cut", "export")
    ended = shop.train("run", *words, "--faults", "nan rank=0 step=5")
    assert ended.code == 1 and "did not happen: nan rank=0 step=5" in ended.err, ended.text
    ended = shop.train("last", *words, "--faults", "nan rank=1 step=5")
    assert ended.code == 1 and "NonFiniteError" in ended.err.splitlines()[0], ended.text


@pytest.mark.parametrize(
    ("rank", "words", "memory_every"),
    [(0, ("--layout", "ddp"), "0"), (1, ("--layout", "ddp"), "1"), (2, ("--layout", "dp_replicate=2,dp_shard=2"), "0")],
)
def test_a_corrupt_weight_is_rolled_back_and_the_wrong_copy_named(
    shop: Shop, rank: int, words: tuple[str, ...], memory_every: str
) -> None:
    ranks = 4 if "dp_shard=2" in words[1] else 2
    shared = (*words, "--train.micro_batch_size", "3", "--checkpoint.every", "4", "--train.check_every", "2")
    shared = (*shared, "--checkpoint.memory_every", memory_every)
    assert shop.train("whole", *shared, ranks=ranks).code == 0
    ended = shop.train("run", *shared, "--faults", f"corrupt rank={rank} step=5", ranks=ranks)
    assert ended.code == 0, ended.text
    step = 5 if memory_every == "1" else 6  # each save in memory compares the replicas too
    assert f"from step 4 (disk); {step - 4} step" in ended.text, ended.text
    assert f"step {step} was computed again: rank {rank} had a wrong copy of " in ended.text, ended.text
    assert shop.digest("run") == shop.digest("whole")


def test_a_majority_names_the_wrong_copy_at_once(shop: Shop) -> None:
    ended = shop.train("run", "--train.micro_batch_size", "1", "--survive.restarts", "0", "--checkpoint.every", "4",
                       "--train.check_every", "2", "--faults", "corrupt rank=0 step=5", ranks=3)  # fmt: skip
    assert ended.code == 1 and ended.err.startswith("FAILED at step 6. First error: rank 0, DesyncError"), ended.text
    assert "differs on rank 0 from the copy on most ranks" in ended.err
