"""Checkpoints detect flipped bits, truncated files, kills during a save and full disks."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.checkpoint.files.checkpoint_folder import (
    STAGING_PREFIX,
    check_checkpoint,
    find_newest_usable,
    list_checkpoints,
    mark_best,
    open_checkpoint,
    prune_checkpoints,
    remove_leftovers,
)
from paceline.checkpoint.files.safetensors_io import TensorBytes
from paceline.checkpoint.files.two_phase_commit import commit_checkpoint
from paceline.errors import CheckpointError
from tests.checkpoint.write_checkpoint import save, write_part

STATE = {
    "identity": {"seed": 1},
    "cursor": {"epoch": 0, "position": 4, "samples": 4, "step": 1},
    "feed": {},
    "aliases": {},
    "optimizers": [],
    "schedules": [],
    "lr": 0.1,
    "text": "ü",
}


def tensors(fill: int, *, num: int = 3, size: int = 500) -> list[TensorBytes]:
    rng = random.Random(fill)
    return [
        TensorBytes(name=f"layer.{i}", dtype="F32", shape=(size,), data=memoryview(rng.randbytes(4 * size)))
        for i in range(num)
    ]


def write(folder: Path, step: int) -> Path:
    files = {"model.safetensors": tensors(step), "optimizer.safetensors": tensors(step + 1000)}
    return save(folder, step=step, files=files, state={**STATE, "step": step})


def content(path: Path) -> tuple[object, ...]:
    loaded = open_checkpoint(path)
    return (loaded.state, {f: {n: bytes(t.data) for n, t in ts.items()} for f, ts in loaded.files.items()})


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    loaded = open_checkpoint(path)
    assert loaded.step == 7 and loaded.state["text"] == "ü"
    assert bytes(loaded.files["model.safetensors"]["layer.1"].data) == bytes(tensors(7)[1].data)
    assert (tmp_path / "latest").read_text().strip() == "step-00000007"


def test_plain_safetensors_reads_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    found = load_file(write(tmp_path, 7) / "model.safetensors")
    assert found["layer.0"].tobytes() == bytes(tensors(7)[0].data)


def test_no_flipped_bit_loads_silently(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good", 5), tmp_path / "bad"
    expected = content(good)
    files = [p for p in good.iterdir() if p.is_file()]
    rng = random.Random(0)
    refused = 0
    for _ in range(600):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad / good.name)
        target = bad / good.name / rng.choice(files).name
        data = bytearray(target.read_bytes())
        at = rng.randrange(len(data) * 8)
        data[at // 8] ^= 1 << (at % 8)
        target.write_bytes(data)
        try:
            assert content(bad / good.name) == expected
        except CheckpointError:
            refused += 1
    assert refused >= 590  # a bit of white space in the manifest may change nothing


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "foreign", "outside", "empty", "huge header"])
def test_the_newest_good_one_is_used_and_the_bad_one_named(tmp_path: Path, damage: str) -> None:
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    weights, manifest = second / "model.safetensors", second / "manifest.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        manifest.unlink()
    elif damage == "foreign":
        manifest.write_text('{"weight_map": {}}')
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "huge header":
        weights.write_bytes((1 << 62).to_bytes(8, "little") + weights.read_bytes()[8:])
    else:
        _rewrite(manifest, lambda body: body["files"].update({"../../x": body["files"].pop("model.safetensors")}))
    path, refused = find_newest_usable(tmp_path)
    assert path == first
    assert [r.path for r in refused] == [second] and refused[0].reason


def test_another_format_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    _rewrite(path / "manifest.json", lambda body: body.update(format="paceline-checkpoint-9"))
    with pytest.raises(CheckpointError, match="paceline-checkpoint-9"):
        check_checkpoint(path)


def test_a_kill_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from tests.checkpoint.test_damaged_checkpoints import write\n"
        "folder = Path(sys.argv[1]); step = int(sys.argv[3]); print('go', flush=True)\n"
        "while True:\n    write(folder, step); step += 1\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    write(tmp_path, 1)
    rng, newest = random.Random(1), 1
    for _ in range(40):
        command = [sys.executable, "-c", code, str(tmp_path), root, str(newest + 1)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        time.sleep(rng.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        path, refused = find_newest_usable(tmp_path)
        assert path is not None and all("interrupted" in r.reason for r in refused)
        step = open_checkpoint(path).step
        assert step >= newest
        newest = step
        prune_checkpoints(tmp_path, keep=3)


def test_a_full_disk_leaves_the_old_ones(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("tmpfs can't be mounted here")
    try:
        first = write(mount, 1)
        (mount / "filler").write_bytes(bytes(23 << 20))
        with pytest.raises(CheckpointError, match="MiB") as caught:
            write(mount, 2)
        assert "unchanged" in caught.value.hint
        assert find_newest_usable(mount) == (first, [])
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_retention_keeps_the_last_the_best_and_the_only_good_one(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in range(1, 7)]
    mark_best(tmp_path, paths[1])
    prune_checkpoints(tmp_path, keep=2)
    assert list_checkpoints(tmp_path) == [paths[1], paths[4], paths[5]]
    for path in (paths[1], paths[4], paths[5]):
        (path / "model.safetensors").unlink()
    old = write(tmp_path, 0)
    (tmp_path / "latest").write_text(paths[5].name)
    prune_checkpoints(tmp_path, keep=2)
    assert find_newest_usable(tmp_path)[0] == old


def test_everything_is_flushed_before_the_rename_and_latest_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_fsync, real_rename, real_replace = os.fsync, Path.rename, Path.replace

    def fsync(handle: int) -> None:
        calls.append("fsync " + Path(f"/proc/self/fd/{handle}").readlink().name)
        real_fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        calls.append(f"rename {target.name}")
        return real_rename(self, target)

    def replace(self: Path, target: Path) -> Path:
        calls.append(f"replace {target.name}")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(Path, "replace", replace)
    for _ in range(2):  # the second save of the step puts the first one aside
        calls.clear()
        write(tmp_path, 1)
        moved, latest = calls.index("rename step-00000001"), calls.index("replace latest")
        flushed = calls[:moved]
        assert "fsync model.safetensors" in flushed and "fsync optimizer.safetensors" in flushed
        manifest = calls.index("replace manifest.json")
        assert any(call.startswith("fsync .manifest.json.") for call in calls[:manifest])
        assert any(call.startswith("fsync .saving-step-") for call in calls[manifest:moved])
        assert f"fsync {tmp_path.name}" in calls[moved:latest]  # of the rename, and not that of `latest`
        assert any(call.startswith("fsync .latest.") for call in calls[moved:latest])


def test_a_step_that_is_saved_again_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before or after any rename or removal leaves one of both saves, whole."""
    final = write(tmp_path, 3)
    real, seen = {name: getattr(owner, name) for owner, name in ((Path, "rename"), (shutil, "rmtree"))}, []

    def watched(name: str) -> object:
        def call(path: Path, *words: object, **more: object) -> object:
            if tmp_path not in path.parents:  # what is done to a copy
                return real[name](path, *words, **more)
            for when in (0, 1):
                found = real[name](path, *words, **more) if when else None
                copy = tmp_path.with_name(f"{tmp_path.name}-{len(seen)}")
                shutil.copytree(tmp_path, copy)
                for left in copy.glob(f"{STAGING_PREFIX}*-{os.getpid()}"):  # as if this process had been killed
                    os.rename(left, left.with_name(left.name.removesuffix(str(os.getpid())) + "999999999"))  # noqa: PTH104
                good, _ = find_newest_usable(copy)
                seen.append(good is not None and good.name == final.name)
            return found

        return call

    monkeypatch.setattr(Path, "rename", watched("rename"))
    monkeypatch.setattr(shutil, "rmtree", watched("rmtree"))
    write(tmp_path, 3)
    assert len(seen) >= 6 and all(seen)


def test_what_interrupted_saves_left_is_removed_by_the_next(tmp_path: Path) -> None:
    living = str(os.getppid())
    gone = [
        f"{STAGING_PREFIX}step-00000002-999999999",
        f"{STAGING_PREFIX}old-step-00000001-999999999",
        f"{STAGING_PREFIX}gone-step-00000000",
    ]
    write(tmp_path, 1)
    for name in (*gone, f"{STAGING_PREFIX}step-00000003-{living}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    write(tmp_path, 2)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(STAGING_PREFIX))
    assert left == [f"{STAGING_PREFIX}step-00000003-{living}"]  # its writer lives


def test_parts_that_are_never_committed_are_not_seen(tmp_path: Path) -> None:
    aside = tmp_path / ".saving-step-00000009-999999"
    aside.mkdir()
    write_part(aside, files={"model.safetensors": tensors(9)}, state=STATE, step=9)
    assert list_checkpoints(tmp_path) == []
    assert find_newest_usable(tmp_path)[1][0].reason == "the save was interrupted"
    assert commit_checkpoint(tmp_path, aside, step=9) == find_newest_usable(tmp_path)[0]


def _rewrite(manifest: Path, change: object) -> None:
    """A manifest that was changed together with its digest, as an attacker would."""
    from paceline.checkpoint.files.safetensors_io import sha256_digest

    body = json.loads(json.loads(manifest.read_text())["body"])
    change(body)  # type: ignore[operator]
    text = json.dumps(body)
    manifest.write_text(json.dumps({"digest": sha256_digest(text.encode()), "body": text}))


def test_a_kill_between_the_two_renames_of_a_second_save_loses_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    aside = tmp_path / f"{STAGING_PREFIX}old-{path.name}-999999999"
    path.rename(aside)
    assert find_newest_usable(tmp_path)[0] == path and open_checkpoint(path).state["step"] == 3
    path.rename(aside)
    remove_leftovers(tmp_path)
    assert path.is_dir()


def test_a_renamed_folder_is_not_the_step_that_its_name_says(tmp_path: Path) -> None:
    good = write(tmp_path, 3)
    renamed = write(tmp_path, 6).rename(tmp_path / "step-00000020")
    with pytest.raises(
        CheckpointError, match="step-00000020 holds step 6, which differs from the folder's name"
    ) as found:
        check_checkpoint(renamed)
    assert found.value.hint == "mv step-00000020 step-00000006"
    path, refused = find_newest_usable(tmp_path)
    assert path == good and [each.path for each in refused] == [tmp_path / "step-00000006", renamed]
    elsewhere = renamed.rename(tmp_path / "kept")
    assert open_checkpoint(elsewhere).step == 6  # a name that says no step says nothing wrong
