"""The folders of checkpoints in memory that killed commands left behind."""

from pathlib import Path

import pytest

from paceline.filesystem.run_lock import lock_run_folder
from paceline.launch import memory_disk


def test_only_the_folders_of_ended_commands_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "shm"
    disk.mkdir()
    monkeypatch.setattr(memory_disk, "MEMORY_DISK", disk)
    runs = {name: tmp_path / name for name in ("ended", "running")}
    folders = {}
    for name, run in {**runs, "elsewhere": tmp_path / "not here"}.items():
        folders[name] = Path(memory_disk.choose_memory_folder())
        folders[name].mkdir()
        (folders[name] / memory_disk.LOCKED_RUN).write_text(str(run))
    folders["new"] = Path(memory_disk.choose_memory_folder())
    folders["new"].mkdir()
    locks = {name: lock_run_folder(run, on_wait=print) for name, run in runs.items()}
    locks["ended"].close()
    memory_disk.remove_abandoned_memory_folders()
    assert sorted(name for name, folder in folders.items() if folder.exists()) == ["elsewhere", "new", "running"]
    locks["running"].close()
