"""Checkpoints in a store that is elsewhere: an S3 server of its own process, with everything that can go wrong."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ended, Shop
from tests.trainer.saving.s3_server import SECRET, S3Server

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = pytest.mark.one_worker  # which starts one server

STEPS = 12


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server.start()
    server.write("bucket")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory, warm: None) -> str:
    """The digest of the run that nothing disturbed, without a store."""
    from tests.conftest import SMALL_JOB

    shop = Shop(tmp_path_factory.mktemp("whole"))
    shop.write("job.py", SMALL_JOB)
    ended = shop.train("whole", "--checkpoint.every", "4", ranks=1, steps=STEPS)
    assert ended.code == 0, ended.text
    return shop.digest("whole")


def remote_of(shop: Shop) -> str:
    """A folder of the bucket that no other test uses."""
    return f"bucket/{shop.path.name}"


def words(shop: Shop, *more: str, steps: int = STEPS, run: str = "run") -> list[str]:
    return [
        "train", "job.py", "--run-dir", run, "--train.steps", str(steps), "--checkpoint.every", "4", "--eval.every", "100",
        "--watch.to", "console,jsonl", "--checkpoint.remote", f"s3://{remote_of(shop)}", *more,
    ]  # fmt: skip


def train(shop: Shop, server: S3Server, *more: str, steps: int = STEPS, ranks: int = 1, **environ: str) -> Ended:
    return shop.run(
        *words(shop, "--ranks", str(ranks), *more, steps=steps), environ={**server.environ, **environ}, timeout=60
    )


def events(shop: Shop, kind: str, run: str = "run") -> list[dict[str, Any]]:
    lines = (shop.path / run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def lose_disk(shop: Shop) -> None:
    shutil.rmtree(shop.path / "run")


def find_secret(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_machine_with_an_empty_disk_ends_with_the_same_bits(shop: Shop, server: S3Server, digest: str) -> None:
    first = train(shop, server, "--train.micro_batch_size", "6", "--faults", "stop rank=0 step=6", ranks=2)
    assert first.code == 75 and server.latest(f"{remote_of(shop)}/run") == "step-00000006", first.text
    assert f"uploaded s3://{remote_of(shop)}/run/checkpoints/step-00000006 | " in first.out
    assert not find_secret(shop.path)
    lose_disk(shop)
    second = train(shop, server, ranks=2)
    assert second.code == 0, second.text
    assert f"downloaded s3://{remote_of(shop)}/run/checkpoints/step-00000006 | " in second.out
    assert "resumed: step-00000006" in second.out and "microbatches of 6" in second.out
    whole = shop.train("whole", "--train.micro_batch_size", "6", "--checkpoint.every", "4")
    assert whole.code == 0 and shop.digest("run") == shop.digest("whole")
    steps = {
        key.split("/")[3] for key in server.keys("bucket") if key.startswith(f"{shop.path.name}/run/checkpoints/s")
    }
    assert steps == {"step-00000006", "step-00000008", "step-00000012"}
    third = train(shop, server, ranks=2)
    assert third.code == 0 and "nothing left to do" in third.out and "uploaded" not in third.out


def test_killed_in_an_upload_it_loses_nothing(shop: Shop, server: S3Server, digest: str) -> None:
    remote = f"{remote_of(shop)}/run"
    server.gate.hold_at(f"PUT /{remote}/checkpoints/step-00000008/optimizer")
    process = shop.start(*words(shop), environ={**server.environ, "PAUSE": "0.05"})
    server.gate.wait_until_held()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    server.gate.close()
    server.gate.open()
    half = [
        key
        for key in server.keys("bucket")
        if key.startswith(f"{remote.removeprefix('bucket/')}/checkpoints/step-00000008")
    ]
    assert [key.rpartition("/")[2] for key in half] == ["model.safetensors"]
    assert server.latest(remote) == "step-00000004", "a reader sees the one before"
    shutil.move(shop.path / "run", shop.path / "kept")
    elsewhere = train(shop, server, steps=4)
    assert elsewhere.code == 0 and "resumed: step-00000004" in elsewhere.out and "refused" not in elsewhere.text
    lose_disk(shop)
    shutil.move(shop.path / "kept", shop.path / "run")
    again = train(shop, server)
    assert again.code == 0 and "resumed: step-00000008" in again.out, again.text
    assert shop.digest("run") == digest and server.latest(remote) == "step-00000012"


def test_a_server_that_is_away_for_a_while_is_no_reason_to_wait(shop: Shop, server: S3Server, digest: str) -> None:
    remote = f"{remote_of(shop)}/run"
    process = shop.start(*words(shop), environ={**server.environ, "PAUSE": "0.15"})
    try:
        server.wait_for_latest(remote, "step-00000004")
        server.gate.close()
        log = shop.path / "run" / "logs" / "attempt-1" / "rank-0.log"
        until = time.monotonic() + 30
        while "saved step-00000012" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        assert "warning: step 8 is not uploaded yet; the run continues" in log.read_text()
    finally:
        server.gate.open()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert out.count("not uploaded yet") == 1 and out.count("can be written again, after ") == 1, out
    assert (
        "uploaded s3" in out
        and "step-00000008 | " not in out.partition("can be written")[0].partition("saved step-00000012")[2]
    )
    assert server.latest(remote) == "step-00000012" and shop.digest("run") == digest


def test_a_server_that_stays_away_is_said_and_the_same_command_uploads_later(
    shop: Shop, server: S3Server, digest: str
) -> None:
    remote = f"{remote_of(shop)}/run"
    server.gate.close()
    try:
        fresh = train(shop, server)
        assert fresh.code == 3 and "the server is away or overloaded" in fresh.err, fresh.text
        assert fresh.err.startswith("FAILED. First error: rank 0, MachineError: s3://"), fresh.err
    finally:
        server.gate.open()
    assert train(shop, server, steps=4).code == 0
    server.gate.close()
    try:
        ended = train(shop, server, "--checkpoint.remote_timeout", "1.5")
        assert ended.code == 75, ended.text
        assert "The run continues from its disk, and uploads later" in ended.out
        assert "warning: step 12 is only on disk; the same command uploads it: s3://" in ended.out
        assert ended.err.splitlines()[-1].startswith("Stopped and saved. Resume: ") and shop.digest("run") == digest
        assert [event["is_final"] for event in events(shop, "UploadFailed")] == [False, True]
    finally:
        server.gate.open()
    assert server.latest(remote) == "step-00000004"
    later = train(shop, server)
    assert later.code == 0 and "nothing left to do" in later.out and server.latest(remote) == "step-00000012"


def test_wrong_credentials_and_a_missing_bucket_are_found_before_the_first_step(shop: Shop, server: S3Server) -> None:
    server.check_credentials(True)
    try:
        wrong = train(shop, server, ranks=2)
    finally:
        server.check_credentials(False)
    assert wrong.code == 2 and "InvalidAccessKeyId" in wrong.err and "AWS_SECRET_ACCESS_KEY" in wrong.err, wrong.text
    assert "rank 0, UsageError: s3://" in wrong.err and "step 1 " not in wrong.out
    none = train(shop, server, "--checkpoint.remote", "s3://nobucket/a")
    assert none.code == 2 and "the bucket s3://nobucket does not exist" in none.err, none.text
    assert "aws s3 mb s3://nobucket" in none.err
    assert not find_secret(shop.path) and not any(SECRET in ended.text for ended in (wrong, none))
    assert not any("probe" in key for key in server.keys("bucket"))


def test_half_an_object_is_refused_and_the_one_before_is_used(shop: Shop, server: S3Server, digest: str) -> None:
    remote = f"{remote_of(shop)}/run"
    assert train(shop, server, steps=8).code == 0
    file = f"{remote}/checkpoints/step-00000008/optimizer.safetensors"
    server.write(file, server.read(file)[:500])
    lose_disk(shop)
    ended = train(shop, server)
    assert ended.code == 0 and shop.digest("run") == digest, ended.text
    assert f"refused s3://{remote}/checkpoints/step-00000008: optimizer.safetensors has 500 bytes, but " in ended.out
    assert "resumed: step-00000004" in ended.out and server.latest(remote) == "step-00000012"
    for step in ("08", "12"):  # all that are left
        file = f"{remote}/checkpoints/step-000000{step}/model.safetensors"
        server.write(file, server.read(file)[:-1] + b"\1")
    file = f"{remote}/checkpoints/step-00000004/model.safetensors"
    server.write(file, b"")
    lose_disk(shop)
    none = train(shop, server)
    assert none.code == 2 and "none of the 3 checkpoints can be used" in none.err and "another --run-dir" in none.err


def test_two_runs_of_one_name_do_not_mix_their_checkpoints(shop: Shop, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    for number in ("1", "2"):
        (tmp_path / number).mkdir()
    options = ("--train.steps", "2", "--checkpoint.every", "1")
    assert shop.run("train", "job.py", "--run-dir", "1/run", *options, "--checkpoint.remote", store).code == 0
    assert shop.run("train", "job.py", "--run-dir", "2/run", *options).code == 0
    mixed = shop.run("train", "job.py", "--run-dir", "2/run", "--train.steps", "4", "--checkpoint.remote", store)
    assert mixed.code == 2 and "has the checkpoints of another run" in mixed.err, mixed.text


def test_a_run_may_start_from_a_url(shop: Shop, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    more = ("--checkpoint.every", "4", "--checkpoint.remote", store)
    assert shop.train("run", *more, ranks=1, steps=STEPS).code == 0
    resume = ("--resume", f"{store}/run/checkpoints/step-00000008", "--checkpoint.every", "4")
    branch = shop.train("branch", *resume, ranks=1, steps=STEPS)
    assert branch.code == 0 and "resumed: step-00000008" in branch.out, branch.text
    assert shop.digest("branch") == shop.digest("run")
    again = shop.train("branch", *resume, ranks=1, steps=STEPS + 1)
    assert again.code == 0 and "resumed: step-00000012" in again.out, "the branch has its own checkpoints now"
    nothing = shop.train("other", "--resume", f"{store}/none", ranks=1)
    assert nothing.code == 2 and "there is no checkpoint in file://" in nothing.err, nothing.text


def test_damage_of_all_checkpoints_on_disk_is_repaired_from_the_store(shop: Shop, tmp_path: Path) -> None:
    more = ("--checkpoint.every", "4", "--checkpoint.remote", f"file://{tmp_path}/store")
    assert shop.train("run", *more, ranks=1, steps=8).code == 0
    for path in (shop.path / "run" / "checkpoints").glob("step-*"):
        (path / "model.safetensors").write_bytes(b"")
    ended = shop.train("run", *more, ranks=1, steps=STEPS)
    assert ended.code == 0 and "resumed: step-00000008" in ended.out, ended.text
    assert ended.out.count("refused run/checkpoints/step-") == 2


def test_a_restart_by_itself_uploads_what_the_attempt_before_did_not(shop: Shop, tmp_path: Path) -> None:
    more = ("--checkpoint.every", "4", "--checkpoint.remote", f"file://{tmp_path}/store")
    ended = shop.train("run", *more, "--faults", "kill rank=1 step=6", steps=STEPS)
    assert ended.code == 0 and "restarted in" in ended.out, ended.text
    assert (tmp_path / "store/run/checkpoints/latest").read_text() == "step-00000012\n"
    assert {event["step"] for event in events(shop, "CheckpointUploaded")} >= {4, 12}
