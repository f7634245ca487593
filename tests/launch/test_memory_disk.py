"""The folders of checkpoints in memory that killed commands left behind."""

import json
import os
import shutil
from pathlib import Path

import pytest

from paceline.filesystem.run_lock import lock_run_folder
from paceline.launch import memory_disk


def test_only_the_folders_of_ended_commands_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "shm"
    disk.mkdir()
    monkeypatch.setattr(memory_disk, "MEMORY_DISK", disk)
    locks = {name: lock_run_folder(tmp_path / name, on_wait=print) for name in ("ended", "running", "replaced")}
    records = {name: memory_disk.describe_lock(tmp_path / name) for name in locks}
    records |= {"gone": json.dumps([str(tmp_path / "gone" / ".lock"), 1, 1]), "empty": "", "damaged": "[]"}
    folders = {}
    for name, record in records.items():
        folders[name] = Path(memory_disk.choose_memory_folder())
        folders[name].mkdir()
        (folders[name] / memory_disk.LOCKED_RUN).write_text(record)
    for name in ("without a record", "with a pipe"):
        folders[name] = Path(memory_disk.choose_memory_folder())
        folders[name].mkdir()
    os.mkfifo(folders["with a pipe"] / memory_disk.LOCKED_RUN)
    locks["ended"].close()
    locks["replaced"].close()
    shutil.move(tmp_path / "replaced", tmp_path / "elsewhere")  # and another run has its name now
    lock_run_folder(tmp_path / "replaced", on_wait=print).close()
    memory_disk.remove_abandoned_memory_folders(tmp_path / "another")
    assert {name for name, folder in folders.items() if not folder.exists()} == {"ended"}
    memory_disk.remove_abandoned_memory_folders(tmp_path / "running")  # as its next command, which has locked it
    assert {name for name, folder in folders.items() if not folder.exists()} == {"ended", "running"}
    locks["running"].close()
