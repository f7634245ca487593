"""Checkpoints in a store that is elsewhere: an S3 server of its own process, with everything that can go wrong."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.files.checkpoint_folder import mark_best, prune_checkpoints
from paceline.checkpoint.files.remote_errors import RemoteError
from paceline.checkpoint.files.remote_folder import RemoteFolder
from paceline.checkpoint.files.remote_store import RemoteStore, open_remote_store
from paceline.errors import MachineError, UsageError
from paceline.events import CheckpointUploaded, Event, Note, UploadFailed
from paceline.reporting.run_history import read_history
from paceline.reporting.run_report import _show_notes
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.saving import remote_tier
from paceline.trainer.saving.remote_start import RemoteConnection, _connect
from paceline.trainer.saving.remote_tier import RemoteTier
from tests.checkpoint.test_remote_folder import write_step
from tests.conftest import SMALL_JOB, Ended, Shop
from tests.trainer.saving.s3_server import SECRET, S3Server

pytest.importorskip("obstore")
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


def connect(remote: str, run: Path) -> RemoteConnection:
    return _connect(remote, "", run=RunFolder(run), is_restart=False)


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
    assert "step-00000012" in steps and len(steps) <= 3


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


@pytest.mark.parametrize("how", ["away", "overloaded"])
def test_a_server_that_is_away_for_a_while_is_no_reason_to_wait(
    shop: Shop, server: S3Server, digest: str, how: str
) -> None:
    remote = f"{remote_of(shop)}/run"
    process = shop.start(*words(shop), environ={**server.environ, "PAUSE": "0.15"})
    try:
        server.wait_for_latest(remote, "step-00000004")
        server.gate.close()
        if how == "overloaded":  # it answers each request with 503
            server.gate.num_failures = 1000
            server.gate.open()
        log = shop.path / "run" / "logs" / "attempt-1" / "rank-0.log"
        until = time.monotonic() + 30
        # of step 4 if the gate was closed before the answer to its last request; of step 12 if the run was faster
        signs = ("saved step-00000012", r"warning: step (4|8|12) is not uploaded yet; the run continues")
        while not all(re.search(sign, log.read_text()) for sign in signs):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
    finally:
        server.gate.num_failures = 0
        if how == "away":
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
    assert train(shop, server, steps=4).code == 0
    server.gate.close()
    try:
        ended = train(shop, server, "--checkpoint.remote_timeout", "1.5")
        assert ended.code == 75, ended.text
        assert "The run continues from its disk, and uploads later" in ended.out
        assert "warning: step 12 is only on disk; the same command uploads it: s3://" in ended.out
        assert ended.err.splitlines()[-1].startswith("Stopped and saved. Resume: ") and shop.digest("run") == digest
        assert [event["is_final"] for event in events(shop, "UploadFailed")] == [False, True]
        assert "step 12 not uploaded: s3://" in _show_notes(read_history(RunFolder(shop.path / "run")))
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
    assert not find_secret(shop.path) and SECRET not in wrong.text


@pytest.mark.parametrize(
    ("remote", "kind", "told"),
    [
        ("s3://nobucket/a", UsageError, "the bucket s3://nobucket does not exist"),
        ("s3://bucket/a", MachineError, "the server is away or overloaded"),
        ("file:///proc/none", UsageError, "file:///proc/none/run can't be written: No such file or directory"),
    ],
)
def test_a_store_that_can_not_be_used_stops_a_run_with_an_empty_disk(
    tmp_path: Path, server: S3Server, remote: str, kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = {} if "nobucket" in remote else {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    for name, value in {**server.environ, **address}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir()
    with pytest.raises(kind) as caught:
        connect(remote, tmp_path / "run")
    assert told in str(caught.value) and SECRET not in str(caught.value)
    assert not any("probe" in key for key in server.keys("bucket"))
    write_step(tmp_path / "run" / "checkpoints", 4)
    if kind is MachineError:  # then the run can start from its disk
        (event,) = connect(remote, tmp_path / "run").events
        assert "The run continues from its disk, and uploads later" in str(event)


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


class Watched(RemoteStore):
    """A store whose uploads wait until the test lets them pass, or fail."""

    def prepare(self) -> None:
        self.has_begun, self.may_pass, self.is_away = threading.Event(), threading.Event(), False
        self.may_pass.set()

    def upload(self, file: Path, name: str, *, on_bytes: Callable[[int], None]) -> None:
        self.has_begun.set()
        assert self.may_pass.wait(30)
        if self.is_away:
            raise RemoteError("away", is_temporary=True)
        super().upload(file, name, on_bytes=on_bytes)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    opened = open_remote_store(f"file://{tmp_path}/store/run")
    store = Watched(opened.url, store=opened._store)
    store.prepare()
    return store


def open_tier(tmp_path: Path, store: RemoteStore, told: list[Event]) -> RemoteTier:
    run = tmp_path / "run"
    return RemoteTier(RemoteFolder(store), run=run, checkpoints=run / "checkpoints", keep=3, emit=told.append)


def uploaded(told: list[Event]) -> list[int]:
    return [event.step for event in told if isinstance(event, CheckpointUploaded)]


def test_a_newer_checkpoint_takes_the_place_of_one_that_waits(tmp_path: Path, watched: Watched) -> None:
    told: list[Event] = []
    folder = tmp_path / "run" / "checkpoints"
    first = write_step(folder, 10)
    watched.may_pass.clear()
    tier = open_tier(tmp_path, watched, told)
    tier.start()
    assert watched.has_begun.wait(10)
    for step in (20, 30):
        write_step(folder, step)
        prune_checkpoints(folder, keep=1, path_in_use=tier.path_in_use)
        tier.on_commit()
    assert first.exists() and not (folder / "step-00000020").exists(), "what is being read stays on disk"
    watched.may_pass.set()
    assert tier.finish(timeout_seconds=10, is_interrupted=lambda: False)
    assert uploaded(told) == [10, 30]
    mark_best(folder, first)
    tier.on_commit()
    assert tier.finish(timeout_seconds=10, is_interrupted=lambda: False)
    assert (tmp_path / "store/run/checkpoints/best").read_text() == "step-00000010\n"
    tier.close()


def test_the_end_of_a_run_ends_an_upload_in_the_middle_of_a_file(tmp_path: Path, watched: Watched) -> None:
    def upload(*_: Any, on_bytes: Callable[[int], None]) -> None:
        watched.has_begun.set()
        while True:
            on_bytes(1)
            time.sleep(0.01)

    told: list[Event] = []
    watched.upload = upload  # type: ignore[method-assign]
    write_step(tmp_path / "run" / "checkpoints", 10)
    tier = open_tier(tmp_path, watched, told)
    tier.start()
    assert watched.has_begun.wait(10)
    tier.close()
    assert not tier._thread.is_alive() and not told


def test_failures_in_a_row_are_said_once_and_so_is_their_end(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "_FIRST_DELAY_SECONDS", 0.02)
    told: list[Event] = []
    watched.is_away = True
    write_step(tmp_path / "run" / "checkpoints", 10)
    tier = open_tier(tmp_path, watched, told)
    tier.start()
    assert not tier.finish(timeout_seconds=0.5, is_interrupted=lambda: False)
    assert [(event.step, event.is_final) for event in told if isinstance(event, UploadFailed)] == [
        (10, False),
        (10, True),
    ]
    begun = time.monotonic()
    assert not tier.finish(timeout_seconds=60, is_interrupted=lambda: True), "Ctrl-C"
    assert time.monotonic() - begun < 5
    watched.is_away = False
    assert tier.finish(timeout_seconds=10, is_interrupted=lambda: False)
    assert uploaded(told) == [10]
    notes = [event.text for event in told if isinstance(event, Note) and "can be written again" in event.text]
    assert len(notes) == 1 and "failed uploads" in notes[0]
    tier.close()


def test_an_error_nobody_thought_of_does_not_end_the_thread(tmp_path: Path, watched: Watched) -> None:
    told: list[Event] = []
    folder = tmp_path / "run" / "checkpoints"
    write_step(folder, 10)
    tier = open_tier(tmp_path, watched, told)
    tier._folder.upload = lambda *_, **__: 1 // 0  # type: ignore[method-assign]
    tier.start()
    assert not tier.finish(timeout_seconds=0.2, is_interrupted=lambda: False)
    assert "ZeroDivisionError" in str(told[0])
    del tier._folder.upload  # type: ignore[method-assign]
    shutil.rmtree(folder / "step-00000010")
    tier.on_commit()
    assert tier.finish(timeout_seconds=10, is_interrupted=lambda: False), "nothing is there to upload"
    write_step(folder, 20)
    tier.on_commit()
    assert tier.finish(timeout_seconds=10, is_interrupted=lambda: False) and uploaded(told) == [20]
    tier.close()


def test_a_damaged_best_checkpoint_is_said_once_and_the_newest_is_uploaded(tmp_path: Path, watched: Watched) -> None:
    told: list[Event] = []
    folder = tmp_path / "run" / "checkpoints"
    best = write_step(folder, 10)
    mark_best(folder, best)
    (best / "a.safetensors").write_bytes(b"")
    write_step(folder, 20)
    tier = open_tier(tmp_path, watched, told)
    tier.start()
    assert tier.finish(timeout_seconds=10, is_interrupted=lambda: False)
    for step in (30, 40):
        write_step(folder, step)
        tier.on_commit()
        assert tier.finish(timeout_seconds=10, is_interrupted=lambda: False), "the run ends with 0, not with 75"
    assert uploaded(told) == [20, 30, 40]
    (warning,) = [event.text for event in told if isinstance(event, Note)]
    assert "the best checkpoint, step-00000010, is not uploaded" in warning
    tier.close()


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_store_that_is_away_keeps_no_run_from_a_restart_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    def fail(_: RemoteFolder) -> list[str]:
        raise RemoteError("the server is away.", is_temporary=True)

    monkeypatch.setattr(RemoteFolder, "list_candidates", fail)
    connect_again = partial(_connect, f"file://{tmp_path}/store", "", run=RunFolder(tmp_path / "run"), is_restart=True)
    if has_memory:
        connection = connect_again(has_memory=True)
        assert connection.target is not None and connection.source is None
    else:
        with pytest.raises(MachineError, match="the server is away"):
            connect_again(has_memory=False)


def test_two_runs_of_one_name_do_not_mix_their_checkpoints(tmp_path: Path) -> None:
    for folder in ("1", "2", "3"):
        (tmp_path / folder / "run").mkdir(parents=True)
    remote = f"file://{tmp_path}/store"
    connect(remote, tmp_path / "1" / "run")
    connect(remote, tmp_path / "1" / "run")
    connect(remote, tmp_path / "2" / "run")  # an empty disk: the same run on another machine
    write_step(tmp_path / "3" / "run" / "checkpoints", 4)
    with pytest.raises(UsageError, match="has the checkpoints of another run"):
        connect(remote, tmp_path / "3" / "run")
    write_step(tmp_path / "2" / "run" / "checkpoints", 4)
    connect(remote, tmp_path / "2" / "run")
    (tmp_path / "store" / "run" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="which says whose checkpoints these are, is damaged"):
        connect(remote, tmp_path / "1" / "run")


@pytest.mark.soak
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


@pytest.mark.soak
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
