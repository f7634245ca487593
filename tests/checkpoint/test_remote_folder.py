"""The remote copy of checkpoints, file by file: what a reader finds after each interruption, and what is refused."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.checkpoint.files.checkpoint_folder import BEST, LATEST, check_checkpoint, mark_best, resolve_mark
from paceline.checkpoint.files.manifest import MANIFEST, update_state
from paceline.checkpoint.files.remote_errors import RemoteError, remove_secrets
from paceline.checkpoint.files.remote_folder import RemoteFolder
from paceline.checkpoint.files.remote_store import RemoteStore, check_remote_url, open_remote_store
from paceline.checkpoint.files.safetensors_io import TensorBytes
from paceline.errors import CheckpointError, UsageError
from tests.checkpoint.test_damaged_checkpoints import STATE
from tests.checkpoint.test_untrusted_files import rewrite
from tests.checkpoint.write_checkpoint import save


def write_step(folder: Path, step: int, *, value: float = 1.0) -> Path:
    files = {
        f"{name}.safetensors": [
            TensorBytes(name=name, dtype="F32", shape=(40,), data=memoryview(struct.pack("40f", *[value + step] * 40)))
        ]
        for name in ("a", "b")
    }
    return save(folder, step=step, files=files, state=STATE)


class Recorded(RemoteStore):
    """A store that records what is sent, and can fail at a file, or damage what it gets."""

    sent: list[str]
    fails_at = ""
    damages = False

    def upload(self, file: Path, name: str, *, on_bytes: Callable[[int], None]) -> None:
        if name.endswith(self.fails_at or "\0"):
            raise RemoteError("cut", is_temporary=True)
        self.sent.append(name)
        super().upload(file, name, on_bytes=on_bytes)
        if self.damages:
            stored = Path(self.url.removeprefix("file://"), name)
            stored.write_bytes(stored.read_bytes()[:-1] + b"?")

    def write(self, name: str, content: bytes) -> None:
        if name.endswith(self.fails_at or "\0"):
            raise RemoteError("cut", is_temporary=True)
        self.sent.append(name)
        super().write(name, content)


def remote_of(tmp_path: Path) -> tuple[RemoteFolder, Recorded]:
    opened = open_remote_store(f"file://{tmp_path}/store/run")
    store = Recorded(opened.url, store=opened._store)
    store.sent = []
    return RemoteFolder(store), store


def nothing(_: int) -> None:
    """Count no bytes."""


def test_the_files_come_first_then_the_manifest_then_the_mark(tmp_path: Path) -> None:
    remote, store = remote_of(tmp_path)
    path = write_step(tmp_path / "run", 10)
    assert remote.upload(path, on_bytes=nothing) > 320
    remote.mark(path.name)
    names = [name.removeprefix("checkpoints/step-00000010/") for name in store.sent]
    assert names == ["a.safetensors", "b.safetensors", MANIFEST, "checkpoints/latest"]
    copied = remote.download(path.name, tmp_path / "other")
    check_checkpoint(copied)
    assert {f.name: f.read_bytes() for f in copied.iterdir()} == {f.name: f.read_bytes() for f in path.iterdir()}
    store.sent.clear()
    assert remote.upload(path, on_bytes=nothing) == 0 and store.sent == []
    update_state(path, extra={"best": 0.5})
    assert remote.upload(path, on_bytes=nothing) == 0 and store.sent == [f"checkpoints/{path.name}/{MANIFEST}"]


@pytest.mark.parametrize("cut", ["a.safetensors", "b.safetensors", MANIFEST, LATEST])
def test_wherever_an_upload_is_cut_a_reader_gets_the_one_before(tmp_path: Path, cut: str) -> None:
    remote, store = remote_of(tmp_path)
    for step in (10, 20):
        path = write_step(tmp_path / "run", step)
        store.fails_at = cut if step == 20 else ""
        try:
            remote.upload(path, on_bytes=nothing)
            remote.mark(path.name)
        except RemoteError:
            assert step == 20
    found, refused = remote.download_newest(tmp_path / "other")
    assert found is not None and found.name == "step-00000010" and not refused
    store.fails_at = ""
    remote.upload(path, on_bytes=nothing)
    remote.mark(path.name)
    found, refused = remote.download_newest(tmp_path / "third")
    assert found is not None and found.name == "step-00000020" and not refused
    check_checkpoint(found)


def test_bytes_that_arrive_wrong_are_noticed(tmp_path: Path) -> None:
    remote, store = remote_of(tmp_path)
    path = write_step(tmp_path / "run", 10)
    store.damages = True
    with pytest.raises(RemoteError, match=r"a\.safetensors has other bytes"):
        remote.upload(path, on_bytes=nothing)
    assert remote.list_candidates() == []


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "manifest", "all manifests"])
def test_a_damaged_newest_one_is_refused_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    remote, _ = remote_of(tmp_path)
    for step in (10, 20):
        remote.upload(write_step(tmp_path / "run", step), on_bytes=nothing)
    remote.mark("step-00000020")
    folder = tmp_path / "store" / "run" / "checkpoints" / "step-00000020"
    file = folder / (MANIFEST if "manifest" in damage else "b.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    if damage == "all manifests":
        (folder.with_name("step-00000010") / MANIFEST).write_text("{}")
    found, ((url, reason), *more) = remote.download_newest(tmp_path / "other")
    assert url.endswith("/store/run/checkpoints/step-00000020") and ".saving" not in reason
    if damage == "all manifests":
        assert found is None and len(more) == 1
    else:
        assert found is not None and found.name == "step-00000010" and not more
    assert not list((tmp_path / "other").glob(".saving*"))


def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    remote, _ = remote_of(tmp_path)
    path = write_step(tmp_path / "run", 10)
    remote.upload(path, on_bytes=nothing)
    manifest = tmp_path / "store/run/checkpoints/step-00000010" / MANIFEST
    rewrite(
        manifest.parent,
        lambda body: body["files"].update({"../../../../escaped.safetensors": body["files"].pop("a.safetensors")}),
    )
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        remote.download(path.name, tmp_path / "other")
    assert not list(tmp_path.rglob("escaped*"))


def test_what_is_damaged_on_disk_is_not_uploaded(tmp_path: Path) -> None:
    remote, store = remote_of(tmp_path)
    path = write_step(tmp_path / "run", 10)
    content = bytearray((path / "a.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a in a\.safetensors differs"):
        remote.upload(path, on_bytes=nothing)
    assert store.sent == []


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    remote, store = remote_of(tmp_path)
    for step in (10, 20, 30, 40, 50):
        path = write_step(tmp_path / "run", step)
        store.fails_at = MANIFEST if step == 30 else ""
        try:
            remote.upload(path, on_bytes=nothing)
        except RemoteError:
            continue
        remote.mark(path.name)
    store.fails_at = ""
    remote.mark("step-00000010", kind=BEST)
    remote.upload(write_step(tmp_path / "run", 60), on_bytes=nothing)  # later than `latest`: the run was taken back
    remote.prune(keep=2)
    kept = sorted(path.name for path in (tmp_path / "store/run/checkpoints").glob("step-*"))
    assert kept == [f"step-000000{step}" for step in (10, 40, 50, 60)]
    found, refused = remote.download_newest(tmp_path / "other")
    assert found is not None and found.name == "step-00000050" and not refused
    best = resolve_mark(tmp_path / "other", BEST)
    assert best is not None and best.name == "step-00000010"
    assert (tmp_path / "other" / LATEST).read_text() == "step-00000050\n"


def test_a_step_that_was_trained_otherwise_replaces_the_copy(tmp_path: Path) -> None:
    remote, store = remote_of(tmp_path)
    remote.upload(write_step(tmp_path / "run", 10), on_bytes=nothing)
    remote.mark("step-00000010")
    path = write_step(tmp_path / "run", 10, value=5.0)
    store.fails_at = "b.safetensors"
    with pytest.raises(RemoteError):
        remote.upload(path, on_bytes=nothing)
    assert not (tmp_path / "store/run/checkpoints/step-00000010" / MANIFEST).exists()
    assert remote.download_newest(tmp_path / "other")[0] is None, "half of each is no checkpoint"
    store.fails_at = ""
    remote.upload(path, on_bytes=nothing)
    found, _ = remote.download_newest(tmp_path / "other")
    assert found is not None and (found / "b.safetensors").read_bytes() == (path / "b.safetensors").read_bytes()


def test_without_a_readable_mark_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    remote, _ = remote_of(tmp_path)
    remote.upload(write_step(tmp_path / "run", 10), on_bytes=nothing)
    remote.store.write("checkpoints/latest", b"../../etc\n")
    found, _ = remote.download_newest(tmp_path / "other")
    assert found is not None and found.name == "step-00000010"
    mark_best(tmp_path / "other", found)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("/mnt/backup", "--checkpoint.remote file:///mnt/backup"),
        ("s3://KEYKEYKEY:hunter22@bucket/a", "contains a user name, a password"),
        ("s3://KEYKEYKEY:hunter/22@bucket/a", "contains a user name, a password"),
        ("s3://bucket/KEYKEYKEY:hunter22@a", "contains a user name, a password"),
        ("s3://bucket/a?secret=hunter22", "contains a user name, a password"),
        ("abfs://box@hunter22.dfs.core.windows.net/a", "az://container/folder, with the account in AZURE_STORAGE"),
        ("s3://", "names no bucket"),
        ("gs:///", "names no bucket"),
        ("file:///", "names no folder"),
        ("file://a", "is not an absolute path"),
        ("s3://bucket/a//b", "has a folder without a name"),
        ("file:///a/../b", "has a folder without a name, or named '.' or '..'"),
        ("simplecache::s3://a/b", "is not a URL"),
        *(
            (f"{kind}://a/b", f"no store of the kind {kind}.\n  to do: --checkpoint.remote s3://bucket/folder, gs")
            for kind in ("memory", "https", "sftp", "hdfs", "smb", "foo")
        ),
    ],
)
def test_a_url_that_can_not_be_used_is_refused_with_what_to_type(url: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_remote_url(url)
    assert told in str(caught.value) and "hunter22" not in str(caught.value)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.files.remote_store.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        check_remote_url("s3://bucket/a")
    assert "needs the package obstore" in str(caught.value) and "pip install 'paceline[s3]'" in str(caught.value)


def test_a_message_keeps_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecretvalue")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTOPSECRET")
    text = 'AKIDTOPSECRET/topsecretvalue at "http://user:pass@host/bucket?X-Amz-Signature=abc"'
    assert remove_secrets(text) == '•••/••• at "http://host/bucket"'
    for mistyped in (
        "s3:/user:hunter22@host/b",
        "s3:user:hunter22@host/b",
        "s3:/AKIA:hun/hunter22@b",
        "s3:/hunter22@b",
    ):
        assert "hunter22" not in remove_secrets(f"checkpoint.remote {mistyped} is not a URL")


def test_a_folder_that_can_not_be_written_is_said_with_its_path() -> None:
    with pytest.raises(RemoteError) as caught:
        open_remote_store("file:///proc/none/a").check_access()
    assert (
        "file:///proc/none/a can't be written: No such file or directory" in str(caught.value)
        and not caught.value.is_temporary
    )
