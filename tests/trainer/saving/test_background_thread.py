"""The thread that writes checkpoints in the background, the copy that it makes, and the memory that it copies from."""

import os
import threading
from pathlib import Path

import pytest

from paceline.checkpoint.files.copy_checkpoint import copy_files
from paceline.comm.process_group import World
from paceline.errors import SaveError
from paceline.events import CheckpointSaved, Note
from paceline.filesystem.run_lock import FolderIdentity
from paceline.trainer.saving.background_saves import BackgroundSaves, BackgroundThread
from paceline.trainer.saving.memory_folder import MemoryFolder


def test_functions_are_called_in_order_beside_the_caller() -> None:
    thread, called, gate = BackgroundThread(), list[str](), threading.Event()
    thread.add(lambda: (gate.wait(10), called.append("first"))[1])
    thread.add(lambda: called.append("second"))
    assert called == []
    gate.set()
    thread.wait()
    assert called == ["first", "second"]
    thread.close()
    assert "paceline-save" not in {other.name for other in threading.enumerate()}


def test_an_error_cancels_what_follows_and_is_raised_once() -> None:
    thread, called = BackgroundThread(), list[str]()

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


def write(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir()
    (path / "file").write_text(str(step))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_copied_stays_in_memory(tmp_path: Path, keeps: bool) -> None:
    memory = MemoryFolder(tmp_path / "memory", world=World.alone(), keeps_checkpoints=keeps)
    lent = memory.write(lambda folder: write(folder, 1))
    memory.lend(lent)
    for step in (2, 3, 4):
        memory.write(lambda folder, step=step: write(folder, step))
    assert (lent / "file").read_text() == "1"
    memory.take_back()
    assert names(memory.path) == (["step-00000003", "step-00000004"] if keeps else [])


def background_saves(folder: Path) -> BackgroundSaves:
    world = World.alone()
    (folder / "run" / "checkpoints").mkdir(parents=True)
    memory = MemoryFolder(folder / "memory", world=world, keeps_checkpoints=False)
    return BackgroundSaves(
        world=world,
        folder=folder / "run" / "checkpoints",
        folder_identity=FolderIdentity(folder / "run"),
        memory=memory,
        is_on=True,
    )


def saved(path: Path) -> CheckpointSaved:
    return CheckpointSaved(step=1, path=str(path), seconds=0.0, num_bytes=0)


def test_a_save_is_told_once_it_is_on_disk(tmp_path: Path) -> None:
    saves, gate = background_saves(tmp_path), threading.Event()
    source, notes = saves.write_to_memory(lambda folder: write(folder, 1))
    assert source is not None and not notes

    def finish(path: Path) -> CheckpointSaved:
        gate.wait(10)
        return saved(path)

    saves.start_copy(source, step=1, finish_save=finish)
    assert saves.take_events() == [] and saves.is_writing
    gate.set()
    saves.complete()
    (event,) = saves.take_events()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert event == saved(checkpoints / "step-00000001") and not saves.is_writing
    assert names(checkpoints) == ["latest", "step-00000001"] and names(tmp_path / "memory") == []
    saves.close()


def test_a_failed_copy_leaves_nothing_and_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = background_saves(tmp_path)
    source, _ = saves.write_to_memory(lambda folder: write(folder, 1))
    assert source is not None

    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "sendfile", full)
    saves.start_copy(source, step=1, finish_save=saved)
    with pytest.raises(SaveError, match="step 1 could not be written: No space left"):
        saves.complete()
    assert names(tmp_path / "run" / "checkpoints") == [] and saves.take_events() == []
    saves.close()


def test_memory_that_is_too_small_turns_it_off_with_a_note(tmp_path: Path) -> None:
    saves = background_saves(tmp_path)

    def refuse(folder: Path) -> Path:
        raise SaveError("a checkpoint needs 2 GiB, but 1 GiB are free.")

    source, (note,) = saves.write_to_memory(refuse)
    assert source is None and not saves.is_on
    assert isinstance(note, Note) and "checkpoint.background is off: a checkpoint needs 2 GiB" in note.text
