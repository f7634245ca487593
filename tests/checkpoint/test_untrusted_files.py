"""Damaged, edited or foreign files of a run folder are refused with a message and never followed.

Whatever can't be loaded is a CheckpointError, so that the older checkpoint is used; what can't be read now is not damage.
"""

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.files import checkpoint_folder as checkpoints
from paceline.checkpoint.files import safetensors_io as tensors_module
from paceline.checkpoint.files.checkpoint_folder import (
    BEST,
    check_checkpoint,
    find_newest_usable,
    is_mark_broken,
    list_checkpoints,
    mark_best,
    open_checkpoint,
    prune_checkpoints,
    resolve_mark,
)
from paceline.checkpoint.files.hf_folder import add_digest, check_consolidated, digest_files, write_model_folder
from paceline.checkpoint.files.resharding_reader import check_coverage
from paceline.checkpoint.files.safetensors_io import TensorBytes, TensorEntry, sha256_digest
from paceline.checkpoint.state_json import decode_state
from paceline.commands import ckpt
from paceline.errors import CheckpointError, MachineError, SaveError, UsageError
from paceline.filesystem.atomic_files import open_regular, read_json, read_regular
from paceline.filesystem.disk_full import explain_disk_error
from paceline.filesystem.run_lock import LOCK, FolderIdentity, lock_run_folder, refuse_links
from paceline.reporting.sinks.jsonl import JsonlSink, read_records
from paceline.run_folder.run_folder import RunFolder
from tests.checkpoint.test_damaged_checkpoints import STATE, tensors, write
from tests.checkpoint.write_checkpoint import save

MODEL = "model.safetensors"


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest's body together with its digest, as somebody would who means it."""
    manifest = path / "manifest.json"
    body = json.loads(json.loads(manifest.read_text())["body"])
    text = change(body)
    text = text if isinstance(text, str) else json.dumps(body, separators=(",", ":"))
    manifest.write_text(json.dumps({"digest": sha256_digest(text.encode()), "body": text}))


def first(body: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = body["files"][MODEL]["tensors"][0]
    return entry


WRONG = (None, "x", [1], -1, 0.5, float("nan"), float("inf"), 10**30, 2**63, True, {})
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"no {key}": lambda b, k=key: b.pop(k) for key in ("format", "step", "state", "files")},
    **{f"files {value!r}": lambda b, v=value: b.update(files=v) for value in WRONG},
    **{f"step {value!r}": lambda b, v=value: b.update(step=v) for value in WRONG},
    **{
        f"{key} of a tensor {value!r}": lambda b, k=key, v=value: first(b).update({k: v})
        for key in ("dtype", "shape", "start", "stop", "at", "whole")
        for value in WRONG
    },
    **{f"no {key} of a tensor": lambda b, k=key: first(b).pop(k) for key in ("name", "dtype", "shape", "start", "digest")},
    **{
        f"{key} of a file {value!r}": lambda b, k=key, v=value: b["files"][MODEL].update({k: v})
        for key in ("header", "bytes", "tensors")
        for value in (None, "x", [None], [[]], -1, 1e30, {})
    },
    **{f"no {key} of the state": lambda b, k=key: b["state"].pop(k) for key in ("identity", "cursor", "feed", "optimizers")},
    **{
        f"{key} of the state {value!r}": lambda b, k=key, v=value: b["state"].update({k: v})
        for key in ("identity", "cursor", "feed", "aliases", "optimizers", "schedules", "extra", "grid")
        for value in (None, ["a"], 3)
    },
    "an alias of nothing": lambda b: b["state"].update(aliases={"tied": "nowhere"}),
    "a cursor of text": lambda b: b["state"]["cursor"].update(epoch="1"),
    "nested deep": lambda b: "[" * 100_000,
    "no object": lambda b: "3",
    "a file with no name": lambda b: b["files"].update({"": b["files"].pop(MODEL)}),
    "a file above": lambda b: b["files"].update({"..": b["files"].pop(MODEL)}),
    "a file with a null": lambda b: b["files"].update({"a\0": b["files"].pop(MODEL)}),
    "a name of 10,000 letters": lambda b: b["files"].update({"x" * 10_000: b["files"].pop(MODEL)}),
    "dimensions without end": lambda b: first(b).update(shape=[10**18] * 100_000),
}  # fmt: skip


def test_every_edit_of_a_manifest_is_refused_and_the_older_checkpoint_used(tmp_path: Path) -> None:
    old, new = write(tmp_path, 1), write(tmp_path, 2)
    whole = (new / "manifest.json").read_bytes()
    for name, change in EDITS.items():
        (new / "manifest.json").write_bytes(whole)
        rewrite(new, change)
        with pytest.raises(CheckpointError):
            check_checkpoint(new)
        found, refused = find_newest_usable(tmp_path)
        assert found == old and [each.path for each in refused] == [new], name
    assert len(EDITS) > 120


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 200_000,
        b'{"digest":' + b"[" * 100_000,
        b"9" * 10_000,
        b'{"digest": "x", "body": "\\ud800"}',
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    old, new = write(tmp_path, 1), write(tmp_path, 2)
    (new / "manifest.json").write_bytes(content)
    assert find_newest_usable(tmp_path)[0] == old


@pytest.mark.parametrize(
    "how", [lambda b: b"\xef\xbb\xbf" + b, lambda b: b.decode().encode("utf-16"), lambda b: b + b"\n",
            lambda b: b'{"digest": "0", ' + b[1:], lambda b: b[:-1] + b', "more": 1}'],
)  # fmt: skip
def test_bit_for_bit_is_said_of_no_other_bytes(tmp_path: Path, how: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path, 1)
    (path / "manifest.json").write_bytes(how((path / "manifest.json").read_bytes()))
    with pytest.raises(CheckpointError, match="differs from what was written"):
        check_checkpoint(path)


@pytest.mark.parametrize("name", ["manifest.json", MODEL])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "gone"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    old, new = write(tmp_path, 1), write(tmp_path, 2)
    replace_by(new / name, kind)
    assert find_newest_usable(tmp_path)[0] == old
    with pytest.raises(CheckpointError):
        open_checkpoint(new)


def replace_by(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.symlink_to("/dev/zero" if kind == "device" else path.name)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_other_files_of_a_run_are_read_as_if_they_were_not_there(tmp_path: Path, kind: str) -> None:
    replace_by(tmp_path / "x.json", kind)
    with pytest.raises((OSError, ValueError)):
        read_json(tmp_path / "x.json")
    assert read_records(tmp_path / "x.json")[0] == []
    replace_by(tmp_path / "best", kind)
    assert resolve_mark(tmp_path, BEST) is None and is_mark_broken(tmp_path, BEST)


def test_a_file_that_is_too_large_or_too_deep_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b"1" * 101)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        read_regular(file, max_bytes=100)
    file.write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(file)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["manifest.json", MODEL])
def test_what_can_not_be_read_now_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    write(tmp_path, 1)
    new = write(tmp_path, 2)
    real = os.open

    def refusing(path: Any, *words: Any, **more: Any) -> int:
        if Path(path) == new / name:
            raise OSError(number, os.strerror(number))
        return real(path, *words, **more)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(MachineError, match=os.strerror(number)):
        find_newest_usable(tmp_path)


def test_the_last_bit_of_a_large_tensor_counts(tmp_path: Path) -> None:
    """Its digest is computed in another thread while it is written, and read in blocks."""
    one = TensorBytes(name="wide", dtype="U8", shape=(33 << 20,), data=memoryview(bytearray(os.urandom(1 << 20) * 33)))
    path = save(tmp_path, step=1, files={MODEL: [one]}, state=STATE)
    check_checkpoint(path)
    file = path / MODEL
    for place in (-1, -(1 << 20), -(17 << 20)):
        with file.open("r+b") as handle:
            handle.seek(place, os.SEEK_END)
            byte = handle.read(1)[0]
            handle.seek(place, os.SEEK_END)
            handle.write(bytes([byte ^ 1]))
            handle.flush()
            for read in (lambda: check_checkpoint(path), lambda: open_checkpoint(path).files[MODEL]["wide"]):
                with pytest.raises(CheckpointError, match="differs from what was written"):
                    read()
            handle.seek(place, os.SEEK_END)
            handle.write(bytes([byte]))
    check_checkpoint(path)


def test_many_pieces_of_one_row_or_column_are_compared_in_linear_time() -> None:
    """Comparing each piece with each other piece would take a minute."""
    number = 10_000
    for shape, whole, at in (((1, 1), (1, number), (0, 1)), ((1, 1), (number, 1), (1, 0))):
        places = [(at[0] * i, at[1] * i) for i in range(number)]
        entries = [TensorEntry(name="w", dtype="U8", shape=shape, start=0, stop=1, digest="", at=place, whole=whole) for place in places]  # fmt: skip
        check_coverage("w", entries)
        with pytest.raises(CheckpointError, match="overlaps another shard"):
            check_coverage("w", [*entries[:-1], entries[7]])


@pytest.mark.parametrize(
    "read", [check_checkpoint, lambda path: ckpt.diff_checkpoints(str(path), str(path))], ids=["verify", "diff"]
)
def test_each_file_of_a_checkpoint_is_opened_once_for_all_of_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    """Once for each tensor, a manifest of 300,000 tensors took twice as long; before that, each header is read once."""
    files = {f"model.rank-{rank:04d}.safetensors": [
        TensorBytes(name=f"layer{index}", dtype="U8", shape=(4,), data=memoryview(bytes([rank] * 4)), at=(4 * rank,), whole=(8,))
        for index in range(50)
    ] for rank in range(2)}  # fmt: skip
    path = save(tmp_path / "checkpoints", step=1, files=files, state=STATE)
    opened: list[str] = []
    monkeypatch.setattr(tensors_module, "open_regular", lambda file: opened.append(file.name) or open_regular(file))
    read(path)
    times = 1 if read is check_checkpoint else 2  # the same checkpoint on both sides
    assert Counter(opened) == dict.fromkeys(files, 2 * times)


def test_a_difference_is_found_in_pieces_that_are_cut_alike_and_otherwise(tmp_path: Path) -> None:
    def saved(name: str, *, cut: int, last: int) -> str:
        data = bytes([*range(7), last])
        pieces = [
            TensorBytes(name="w", dtype="U8", shape=(len(part),), data=memoryview(part), at=(at,), whole=(8,))
            for at, part in ((0, data[:cut]), (cut, data[cut:]))
        ]
        files = {f"model.rank-{rank:04d}.safetensors": [piece] for rank, piece in enumerate(pieces)}
        return str(save(tmp_path / name / "checkpoints", step=1, files=files, state=STATE))

    one = saved("one", cut=4, last=7)
    for name, cut, last in (("equal", 4, 7), ("cut", 3, 7), ("changed", 4, 9), ("both", 3, 9)):
        found = ckpt.diff_checkpoints(one, saved(name, cut=cut, last=last))
        assert found.tensors == ({} if last == 7 else {MODEL: ["w"]}), name


# marks


def test_no_flipped_bit_of_the_mark_costs_the_best(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in range(1, 6)]
    mark_best(tmp_path, paths[1])
    whole = (tmp_path / BEST).read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / BEST).write_bytes(data)
        assert resolve_mark(tmp_path, BEST) == paths[1], data


@pytest.mark.parametrize("content", [b"", b"\0" * 80, b"step-0000", b"step-00000077\n", b"nonsense\nmore\n"])
def test_nothing_is_removed_where_the_mark_can_not_be_read(tmp_path: Path, content: bytes) -> None:
    for step in range(1, 6):
        write(tmp_path, step)
    (tmp_path / BEST).write_bytes(content)
    assert (
        is_mark_broken(tmp_path, BEST)
        and prune_checkpoints(tmp_path, keep=1) == []
        and len(list_checkpoints(tmp_path)) == 5
    )
    (tmp_path / BEST).write_text("step-00000002\n")  # as older versions wrote it, and as a person would
    assert [path.name[-1] for path in prune_checkpoints(tmp_path, keep=1)] == ["1", "3", "4"]


def test_other_digits_are_no_step_and_no_owner(tmp_path: Path) -> None:
    path = write(tmp_path, 30)
    path.rename(tmp_path / ("step-" + "".join(chr(0x660 + int(digit)) for digit in "00000030")))
    (tmp_path / ".saving-step-00000040-²").mkdir()
    assert list_checkpoints(tmp_path) == [] and find_newest_usable(tmp_path)[0] is None
    write(tmp_path, 31)
    assert not (tmp_path / ".saving-step-00000040-²").exists()


# the final model


def test_what_is_no_model_s_stays_in_the_final_folder(tmp_path: Path) -> None:
    real = tmp_path / "disk"
    (real / "data").mkdir(parents=True)
    for name in ("data/rows.bin", "tokenizer.json", "model-00007-of-00009.safetensors", "config.json"):
        (real / name).write_text(name)
    (tmp_path / "consolidated").symlink_to(real)
    for attempt in range(2):
        write_model_folder(tmp_path / "consolidated", tensors(attempt), config={"a": attempt})
        assert {str(p.relative_to(real)) for p in real.rglob("*")} == {
            "data", "data/rows.bin", "tokenizer.json", "config.json", "model.safetensors"
        }  # fmt: skip
        assert (real / "data" / "rows.bin").read_text() == "data/rows.bin"
        assert json.loads((real / "config.json").read_text()) == {"a": attempt}
        assert sorted(digest_files(tmp_path / "consolidated")) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_kill_between_the_old_and_the_new_final_folder_loses_nothing(tmp_path: Path, is_replaced: bool) -> None:
    folder = tmp_path / "consolidated"
    write_model_folder(folder, tensors(0), config=None)
    (folder / "tokenizer.json").write_text("words")
    folder.rename(tmp_path / ".consolidated.before")
    if is_replaced:
        folder.mkdir()
    write_model_folder(folder, tensors(1), config=None)
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["consolidated"]


def consolidated(folder: Path) -> Path:
    write_model_folder(folder / "consolidated", tensors(1), config={"a": 1})
    said = add_digest({"digest": "d", "files": digest_files(folder / "consolidated")})
    (folder / "weights.json").write_text(json.dumps(said))
    return folder / "consolidated"


@pytest.mark.parametrize("name", [MODEL, "config.json", "../weights.json"])
def test_any_flipped_bit_of_the_final_model_is_found(tmp_path: Path, name: str) -> None:
    folder = consolidated(tmp_path)
    assert check_consolidated(folder)
    file = (folder / name).resolve()
    whole = file.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        data = bytearray(whole)
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError):
            check_consolidated(folder)
    file.write_bytes(whole)
    (folder / "extra").touch()
    with pytest.raises(CheckpointError, match="extra in consolidated was not written with the others"):
        check_consolidated(folder)


def test_verify_reads_the_final_model_too(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 1)
    folder = consolidated(tmp_path)
    assert ckpt.verify_checkpoint(str(tmp_path)).consolidated == str(folder)
    assert ckpt.verify_checkpoint(str(folder)).consolidated == str(folder)
    (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:-1] + b"x")
    for where in (tmp_path, folder):
        with pytest.raises(CheckpointError, match="in consolidated differs from what was written"):
            ckpt.verify_checkpoint(str(where))
    (tmp_path / "weights.json").write_text('{"digest": "d"}')  # of an older version
    assert "was not compared" in ckpt.verify_checkpoint(str(tmp_path)).note


def test_the_final_model_goes_where_a_link_points(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "consolidated"
    link.symlink_to(tmp_path / "large" / "model")
    for fill in (1, 2):
        write_model_folder(link, tensors(fill), config=None)
    assert link.is_symlink() and [path.name for path in (tmp_path / "large" / "model").iterdir()] == [MODEL]


# links and folders


@pytest.mark.parametrize("name", [LOCK, "events.jsonl", "metrics.jsonl", "logs", "tb"])
def test_a_run_does_not_write_through_links(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir() if name in ("logs", "tb") else victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(victim)
    with pytest.raises(UsageError, match=f"{name} is a link to {victim}"):
        lock_run_folder(tmp_path / "run", on_wait=print)
    if name.endswith(".jsonl"):
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            JsonlSink(RunFolder(tmp_path / "run"))
    assert victim.is_dir() or victim.read_text() == "precious"


def test_ones_own_link_to_a_larger_disk_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
    refuse_links(tmp_path / "run")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match="that another user created"):
        refuse_links(tmp_path / "run")


def test_prune_removes_nothing_through_a_link(tmp_path: Path) -> None:
    for step in range(1, 6):
        write(tmp_path / "mine" / "checkpoints", step)
    (tmp_path / "theirs" / "logs").mkdir(parents=True)
    (tmp_path / "theirs" / "checkpoints").symlink_to(tmp_path / "mine" / "checkpoints")
    with pytest.raises(UsageError, match="nothing is removed through it"):
        ckpt.prune(str(tmp_path / "theirs"), keep=1)
    assert len(list_checkpoints(tmp_path / "mine" / "checkpoints")) == 5
    linked = tmp_path / "mine" / "checkpoints" / "step-00000001"
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    assert [path.name[-1] for path in ckpt.prune(str(tmp_path / "mine"), keep=1)] == ["2", "3", "4"]
    assert linked.is_symlink()


def test_prune_passes_over_a_step_that_the_run_has_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)

    def removed_by_the_run(path: Path) -> bool:
        shutil.rmtree(tmp_path / "step-00000001", ignore_errors=True)
        return True

    monkeypatch.setattr(checkpoints, "_is_valid", removed_by_the_run)
    assert [path.name for path in prune_checkpoints(tmp_path, keep=1)] == ["step-00000002"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003"]


@pytest.mark.parametrize("how", ["removed", "moved", "made anew", "made anew and locked"])
def test_a_run_whose_folder_is_gone_writes_into_no_other(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    held = lock_run_folder(run, on_wait=print)
    place = FolderIdentity(run)
    place.check()
    run.rename(tmp_path / "elsewhere") if how == "moved" else (run / LOCK).unlink()
    if how != "moved":
        run.rmdir()
    if "anew" in how:
        run.mkdir()
    other = lock_run_folder(run, on_wait=print) if "locked" in how else None
    with pytest.raises(SaveError, match="was moved or removed"):
        place.check()
    for each in (held, other):
        if each is not None:
            each.close()


def test_a_refusal_of_the_disk_has_its_own_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {number: explain_disk_error(OSError(number, ""), tmp_path)[0] for number in (
        errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENOENT, errno.EISDIR, errno.ENOSPC,
    )}  # fmt: skip
    assert len(set(said.values())) == len(said)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # a folder that could not be emptied, for want of rights
        assert explain_disk_error(OSError(errno.ENOTEMPTY, ""), tmp_path)[0] == said[errno.EACCES]
    assert (
        "is read-only" in said[errno.EROFS] and "quota" in said[errno.EDQUOT] and "are free there" in said[errno.ENOSPC]
    )

    class Full:
        f_files, f_favail = 100, 0

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    assert "inodes" in explain_disk_error(OSError(errno.ENOSPC, ""), tmp_path / "none")[0]


@pytest.mark.parametrize(
    "value",
    [
        {"__paceline__": "deque", "value": [1], "maxlen": "x"},
        {"__paceline__": "deque", "value": [1], "maxlen": -1},
        {"__paceline__": "set", "value": [[1], [2]]},
        {"__paceline__": "pairs", "value": [[[1], 2]]},
        {"__paceline__": "counter", "value": 3},
        {"__paceline__": "complex"},
        {"__paceline__": "tensor", "dtype": "nope", "value": 1},
        {"__paceline__": "numpy", "dtype": "nope", "shape": None, "value": 1},
        {"__paceline__": ["unhashable"], "value": [1]},
    ],
)
def test_a_value_of_the_state_that_nobody_writes_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        decode_state({"deep": [value]})
