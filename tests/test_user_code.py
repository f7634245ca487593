"""Whose code a file is, by its location and installer, and which frames of a traceback remain."""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.cli
import paceline.examples.text
from paceline.errors import user_line
from paceline.launch.failures.failure_record import failure_from_exception
from paceline.parallel.sharding.unit_guard import guard_sharded_forward
from paceline.user_code import hide_paceline_frames, is_user_file


@pytest.mark.parametrize(
    "filename",
    [
        "/opt/conda/envs/base/lib/python3.12/site-packages/numpy/core/numeric.py",
        "/usr/lib/python3/dist-packages/yaml/loader.py",
        "/usr/local/lib/python3.10/dist-packages/torch/nn/modules/linear.py",
        "/home/me/.local/lib/python3.11/site-packages/timm/models/vit.py",
        "/cluster/layers/torch-2.13/lib/python3.11/site-packages/einops/einops.py",
        json.__file__,
        os.path.realpath(json.__file__),
        torch.__file__,
        paceline.cli.__file__,
        "<frozen importlib._bootstrap>",
        "<string>",
    ],
)
def test_what_is_installed_anywhere_is_not_the_users(filename: str) -> None:
    assert not is_user_file(filename)


@pytest.mark.parametrize(
    "filename",
    [
        "/home/me/job.py",
        "job.py",
        "/home/me/my-site-packages/job.py",
        f"{Path(json.__file__).parents[1]}-mine/job.py",  # begins with the same letters as Python's own library
        paceline.examples.text.__file__,
        "<stdin>",
        "<ipython-input-3-0a1b2c>",
        "/tmp/ipykernel_4711/123.py",
    ],
)
def test_what_lies_elsewhere_is_the_users(filename: str) -> None:
    assert is_user_file(filename)


def test_what_a_distribution_records_as_its_file_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, project = tmp_path / "target", tmp_path / "project"
    for path in (target / "theirs/__init__.py", target / "mine.py", project / "src/pack/__init__.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    info = target / "theirs-1.0.dist-info"  # pip install --target
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "RECORD").write_text("theirs/__init__.py,,\ntheirs-1.0.dist-info/RECORD,,\n")
    built = project / "src/pack.egg-info"  # pip install -e leaves this in the user's own folder
    built.mkdir()
    (built / "SOURCES.txt").write_text("src/pack/__init__.py\npack/__init__.py\n")
    (built / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: pack\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(target))
    monkeypatch.syspath_prepend(str(project / "src"))
    assert not is_user_file(str(target / "theirs/__init__.py"))
    assert is_user_file(str(target / "mine.py")) and is_user_file(str(project / "src/pack/__init__.py"))


OURS = """
def call(function):
    return function()
"""
THEIRS = """
from paceline.user_code_of_a_test import call
def main(): call(work)
def work(): raise ValueError("mine") from KeyError("first")
def lost(): raise RuntimeError("the socket of my robot timed out")
"""


def test_our_frames_between_the_users_are_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Path(paceline.cli.__file__).parent / "user_code_of_a_test.py"
    module = type(sys)("paceline.user_code_of_a_test")
    exec(compile(OURS, str(ours), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "theirs_of_a_test.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = importlib.import_module("theirs_of_a_test")
    with pytest.raises(ValueError, match="mine") as caught:
        theirs.main()
    before = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    hide_paceline_frames(caught.value)
    after = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert before[-3:] == ["main", "call", "work"] and after[-2:] == ["main", "work"] and "call" not in after
    with pytest.raises(TypeError) as wrong:
        module.call(None)  # type: ignore[attr-defined]
    hide_paceline_frames(wrong.value)  # the error was made in our own code, so that is shown
    assert [frame.name for frame in traceback.extract_tb(wrong.value.__traceback__)][-1] == "call"


def test_what_the_users_code_raises_is_no_echo_of_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost_of_a_test.py").write_text(THEIRS.replace("from paceline.user_code_of_a_test import call", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        importlib.import_module("lost_of_a_test").lost()
    own = failure_from_exception(caught.value, rank=1)
    assert own.where.endswith("lost_of_a_test.py:5") and not own.is_lost_connection
    with pytest.raises(RuntimeError) as native:
        torch.zeros(2) @ torch.zeros(3)  # made in native code, with no `raise` in the user's
    native.value.args = ("Connection closed by peer [127.0.0.1]:4711",)
    assert failure_from_exception(native.value, rank=0).is_lost_connection
    assert user_line(native.value) is not None


@pytest.mark.parametrize("line", ["assert False, 'no DTensor, please'", "raise TypeError('no DTensor, please')"])
def test_what_the_user_says_of_a_dtensor_stays_the_users(line: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def forward():\n    {line}\n")
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    with pytest.raises((AssertionError, TypeError)), guard_sharded_forward():
        space["forward"]()
