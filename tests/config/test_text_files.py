"""User files that hold no text give an error with the file's name and a line to type."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config.merge_settings import read_requested_settings
from paceline.config.text_file import read_user_text
from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.parallel.initialization.safetensors_loading import SafetensorsFolder
from paceline.parallel.tensor_parallel.plan_toml import read_plan
from paceline.schedule import read


def read_settings(path: Path) -> Any:
    return read_requested_settings(file=path, overrides=())


@pytest.mark.parametrize("reader", [read_plan, read, read_settings])
def test_bytes_that_are_no_text(reader: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(b"a = 1\n\x9c\xff\x00")
    with pytest.raises(PacelineError, match=r"given can.t be read as .*: it is not a text file") as caught:
        reader(tmp_path / "given")
    assert str(tmp_path / "given") in (caught.value.where or "") and "byte 6" in (caught.value.where or "")
    assert caught.value.hint


def test_what_is_text_or_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfname: mine")
    assert read_user_text(tmp_path / "marked", expected="it", hint="it") == "name: mine"
    with pytest.raises(UsageError, match="can't be read"):
        read_user_text(tmp_path, expected="it", hint="it")


def refuse(*_: object, **__: object) -> str:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("reader", [read_plan, read, read_settings])
def test_what_somebody_has_no_right_to_read_is_looked_at_with_ls(
    reader: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given").write_text("a = 1")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PacelineError, match="Permission denied") as caught:
        reader(tmp_path / "given")
    assert caught.value.hint == f"ls -l {tmp_path / 'given'}"


def test_an_index_of_weights_that_is_none(tmp_path: Path) -> None:
    for content in (b"\x9c\xff", b"{", b"{}", b"[]"):
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="can't be read: "):
            SafetensorsFolder(tmp_path)
