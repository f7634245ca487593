"""The threads of a save that the training does not wait for, and the copy from memory to disk."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.files.checkpoint_folder import check_checkpoint, read_manifest
from paceline.checkpoint.files.copy_checkpoint import copy_files
from paceline.checkpoint.files.memory_slots import WrittenFile
from paceline.checkpoint.files.safetensors_io import TensorBytes
from paceline.comm.process_group import World
from paceline.errors import CheckpointError, SaveError
from paceline.events import CheckpointSaved, Note
from paceline.filesystem.run_lock import FolderIdentity
from paceline.launch.failures.oom_detection import MemoryLimit
from paceline.launch.memory_disk import LOCKED_RUN, describe_lock
from paceline.trainer.saving import space_checks
from paceline.trainer.saving.background_saves import BackgroundSaves
from paceline.trainer.saving.background_thread import BackgroundThread
from paceline.trainer.saving.memory import memory_folder
from paceline.trainer.saving.memory.memory_folder import MemoryFolder
from paceline.trainer.saving.memory.rank_memory import MemoryCheckpoint
from tests.checkpoint.test_damaged_checkpoints import STATE


def test_functions_are_called_in_order_beside_the_caller() -> None:
    thread, called, gate = BackgroundThread("other"), list[str](), threading.Event()

    def call_first() -> None:
        gate.wait(10)
        called.append("first")

    thread.add(call_first)
    thread.add(lambda: called.append("second"))
    assert called == []
    gate.set()
    thread.wait()
    assert called == ["first", "second"]
    thread.close()
    assert "other" not in {other.name for other in threading.enumerate()}


def test_an_error_cancels_what_follows_and_is_raised_once() -> None:
    thread, called = BackgroundThread("other"), list[str]()

    def fail() -> None:
        raise SaveError("no space")

    thread.add(fail)
    thread.add(lambda: called.append("later"))
    with pytest.raises(SaveError, match="no space"):
        thread.wait()
    thread.add(lambda: called.append("after"))
    thread.wait()
    assert called == ["after"]
    thread.add(fail)
    thread.close()


def test_a_copy_has_the_same_bytes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    contents = {"empty": b"", "small": b"abc", "large": os.urandom(40 << 20)}  # more than two calls
    for name, content in contents.items():
        (source / name).write_bytes(content)
    copy_files(source, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == contents


def test_a_source_that_shrinks_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    (source / "file").write_bytes(bytes(100))
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    with pytest.raises(OSError, match="0 of 100 bytes were copied"):
        copy_files(source, target)


def files_of(step: int, *, elements: int = 10) -> dict[str, list[TensorBytes]]:
    data = bytes([step]) * (4 * elements)
    tensors = [
        TensorBytes(name=name, dtype="F32", shape=(elements,), data=memoryview(data)) for name in ("a.weight", "b")
    ]
    return {"model.safetensors": tensors, "optimizer.safetensors": []}


def begin_write(memory: MemoryFolder, step: int, *, elements: int = 10) -> MemoryCheckpoint:
    return memory.write(step=step, files=files_of(step, elements=elements), state={**STATE, "marker": step})


def write(memory: MemoryFolder, step: int, *, elements: int = 10) -> MemoryCheckpoint:
    checkpoint = begin_write(memory, step, elements=elements)
    memory.complete()
    return checkpoint


def open_folder(folder: Path, *, keeps: bool = True, attempt: int = 1) -> MemoryFolder:
    return MemoryFolder(folder / "memory", world=World.alone(), keeps_checkpoints=keeps, attempt=attempt)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_in_memory_is_sound(tmp_path: Path) -> None:
    memory = open_folder(tmp_path)
    for step in range(1, 7):
        path = begin_write(memory, step, elements=10 if step < 5 else 11).path
    memory.complete()
    for name, step in (("step-00000005", 5), ("step-00000006", 6)):
        check_checkpoint(memory.path / name)
        assert (memory.path / name / "model.safetensors").read_bytes().endswith(bytes([step]) * 88)
        assert read_manifest(memory.path / name).state["marker"] == step
    assert path == memory.path / "step-00000006"
    assert names(memory.path) == ["latest", "slots-1", "step-00000005", "step-00000006"]
    memory.close()


def test_memory_is_allocated_only_once(tmp_path: Path) -> None:
    memory = open_folder(tmp_path)
    inodes = set()
    for step in range(1, 10):
        inodes.add((write(memory, step).path / "model.safetensors").stat().st_ino)
    assert len(inodes) == 3, "two are kept, and one is written"
    slots = memory.path / "slots-1" / "rank-0"
    assert len(names(slots)) == 6
    for step in range(10, 14):
        write(memory, step, elements=12)
    assert len(names(slots)) == 6, "those of another size are removed"
    memory.close()


def test_a_checkpoint_that_a_reader_holds_is_not_overwritten(tmp_path: Path) -> None:
    memory = open_folder(tmp_path)
    path = write(memory, 1).path
    memory.lend(path)
    for step in range(2, 9):
        write(memory, step)
    check_checkpoint(path)
    memory.take_back()
    memory.complete()
    assert names(memory.path) == ["latest", "slots-1", "step-00000007", "step-00000008"]
    memory.close()


def test_the_next_attempt_removes_only_what_no_checkpoint_needs(tmp_path: Path) -> None:
    first = open_folder(tmp_path)
    path = write(first, 1).path
    (first.path / ".saving-step-00000002-memory").mkdir()
    second = open_folder(tmp_path, attempt=2)
    check_checkpoint(path)
    assert names(second.path) == ["latest", "step-00000001"]
    write(second, 2)
    check_checkpoint(path)
    first.close(), second.close()


def test_the_folder_says_which_run_it_belongs_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    memory = MemoryFolder(tmp_path / "memory", world=World.alone(), keeps_checkpoints=True, run=tmp_path / "run")
    write(memory, 1)
    memory.close()
    assert (tmp_path / "memory" / LOCKED_RUN).read_text() == describe_lock(tmp_path / "run")


def test_memory_for_all_copies_is_required_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit(name="the control group's memory", limit_bytes=1000, used_bytes=830)
    monkeypatch.setattr(space_checks, "tightest_shared_limit", lambda: limit)
    memory = open_folder(tmp_path)
    with pytest.raises(SaveError, match="are free in the control group's memory"):
        write(memory, 1)  # three times 80 bytes
    memory.close()
    once = open_folder(tmp_path, keeps=False)
    write(once, 1)
    once.close()
    again = open_folder(tmp_path, attempt=2)
    write(again, 2)  # the checkpoint of the attempt before has a third of the memory already
    again.close()


def test_too_little_memory_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = open_folder(tmp_path)
    path = write(memory, 1).path

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SaveError, match="a checkpoint in memory could not be written: No space left"):
        write(memory, 2)
    check_checkpoint(path)
    assert names(memory.path) == ["latest", "slots-1", "step-00000001"] and names(memory.path / "slots-1") == []
    memory.close()


def test_a_checkpoint_that_can_not_be_committed_is_said_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_folder(tmp_path)
    write(memory, 1)
    memory.complete()

    def damaged(*_: object, **__: object) -> None:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patch:
        patch.setattr(memory_folder, "write_manifest", damaged)
        begin_write(memory, 2)
        memory.add(lambda: pytest.fail("it is not committed"))
        with pytest.raises(CheckpointError, match="could not be written: Input/output error"):
            begin_write(memory, 3)
    assert [name for name in names(memory.path) if "step" in name] == ["step-00000001"]
    memory.close()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_digest_that_fails_on_one_rank_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_rank: int
) -> None:
    """The checkpoint before stays the newest, and rank 0 learns of the error at its next save, without the timeout."""
    worlds = [World(rank=rank, world_size=2, timeout_seconds=20) for rank in (0, 1)]
    memories = [MemoryFolder(tmp_path / "memory", world=world, keeps_checkpoints=True) for world in worlds]
    compute = memory_folder.compute_digests

    def fail(written: Mapping[str, WrittenFile]) -> dict[str, Any]:
        if any(f"rank-000{failing_rank}" in name and "step-00000002" in str(f.path) for name, f in written.items()):
            raise OSError(5, os.strerror(5))
        return compute(written)

    def write_all(step: int) -> None:
        for rank in (1, 0):
            tensor = files_of(step)["model.safetensors"][rank]
            memories[rank].write(step=step, files={f"model.rank-000{rank}.safetensors": [tensor]}, state=STATE)

    monkeypatch.setattr(memory_folder, "compute_digests", fail)
    write_all(1)
    write_all(2)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match="Input/output error" if failing_rank == 0 else "could not compute"):
        memories[0].complete()
    assert time.monotonic() - begun < 10
    assert [name for name in names(tmp_path / "memory") if "step" in name] == ["step-00000001"]
    for memory in memories:
        memory.close()


def background_saves(folder: Path) -> BackgroundSaves:
    (folder / "run" / "checkpoints").mkdir(parents=True)
    return BackgroundSaves(
        world=World.alone(),
        folder=folder / "run" / "checkpoints",
        folder_identity=FolderIdentity(folder / "run"),
        memory=open_folder(folder, keeps=False),
        is_on=True,
    )


def start(saves: BackgroundSaves, finish: Callable[[Path], CheckpointSaved]) -> None:
    source, notes = saves.write_to_memory(lambda memory: begin_write(memory, 1))
    assert source is not None and not notes
    saves.start_copy(source, step=1, finish_save=finish)


def saved(path: Path) -> CheckpointSaved:
    return CheckpointSaved(step=1, path=str(path), seconds=0.0, num_bytes=0)


def test_a_save_is_told_once_it_is_on_disk(tmp_path: Path) -> None:
    saves, gate = background_saves(tmp_path), threading.Event()

    def finish(path: Path) -> CheckpointSaved:
        gate.wait(10)
        return saved(path)

    start(saves, finish)
    assert saves.take_events() == [] and saves.is_writing
    gate.set()
    saves.complete()
    (event,) = saves.take_events()
    saves.close()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert event == saved(checkpoints / "step-00000001") and not saves.is_writing
    assert names(checkpoints) == ["latest", "step-00000001"]
    check_checkpoint(checkpoints / "step-00000001")
    assert names(tmp_path / "memory") == ["latest", "slots-1"]


def test_a_failed_copy_leaves_nothing_and_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = background_saves(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "sendfile", full)
    start(saves, saved)
    with pytest.raises(SaveError, match="step 1 could not be written: No space left"):
        saves.complete()
    assert names(tmp_path / "run" / "checkpoints") == [] and saves.take_events() == []
    saves.close()


def test_a_copy_that_never_began_is_not_taken_for_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory tier has met the error of the checkpoint in memory, and has turned itself off."""
    saves = background_saves(tmp_path)

    def damaged(*_: object, **__: object) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(memory_folder, "write_manifest", damaged)
    start(saves, saved)
    assert saves._memory is not None
    with pytest.raises(CheckpointError):
        begin_write(saves._memory, 2)
    with pytest.raises(SaveError, match="writing it into memory failed"):
        saves.complete()
    saves.close()


def test_memory_that_is_too_small_turns_it_off_with_a_note(tmp_path: Path) -> None:
    saves = background_saves(tmp_path)

    def refuse(memory: MemoryFolder) -> Any:
        raise SaveError("a checkpoint needs 2 GiB, but 1 GiB are free.")

    source, (note,) = saves.write_to_memory(refuse)
    assert source is None and not saves.is_on
    assert isinstance(note, Note) and "checkpoint.background is off: a checkpoint needs 2 GiB" in note.text
