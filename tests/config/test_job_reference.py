"""The job argument of a command: a file with the name of a library, and arguments that are no job."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.config.job_reference import parse_jobref
from paceline.errors import JobError, UsageError
from paceline.job import import_job_module
from paceline.launch.inherited_environment import own_rank


@pytest.mark.parametrize("stem", ["torch", "paceline", "numpy", "safetensors", "random", "notalibrary"])
def test_a_job_with_the_name_of_a_library_leaves_the_library_to_everybody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stem: str
) -> None:
    """Also to the job itself, which imports it."""
    is_library = stem != "notalibrary"
    there = importlib.import_module(stem) if is_library else None
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    file = tmp_path / f"{stem}.py"
    file.write_text(f"import {stem}\nseen = {stem}\ndef make_job(): ...\n")
    made = import_job_module(parse_jobref(str(file)))
    assert made.__file__ == str(file) and isinstance(made.seen, ModuleType)
    assert (sys.modules[stem] is there) is is_library and (made.seen is there) is is_library


def test_a_library_that_nobody_has_imported_yet_stays_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "latelib.py").write_text("word = 'the library'\n")
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    file = tmp_path / "mine" / "latelib.py"
    file.parent.mkdir()
    file.write_text("def make_job():\n    import latelib\n    return latelib.word\n")
    assert import_job_module(parse_jobref(str(file))).make_job() == "the library"


@pytest.mark.parametrize(
    "file, given, says, line",
    [
        ("m/config.json", "m", "is a model's folder", "paceline plan m "),
        ("m/adapter_config.json", "m", "is a model's folder", "paceline new hf"),
        ("m/model-00001-of-00002.safetensors", "m", "is a model's folder", "paceline new hf"),
        ("m/config.json", "m/config.json", "is not a Python file", "paceline plan m/config.json"),
        ("run.toml", "run.toml", "is a settings file", "--config run.toml"),
        ("runs/r/task.json", "runs/r", "is a run folder, not a job", "--resume runs/r"),
        ("code/model.py", "code", "is a folder", "code/job.py"),
    ],
)
def test_what_is_no_job_is_told_with_the_line_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, given: str, says: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(UsageError, match=says) as refused:
        parse_jobref(given)
    assert line in refused.value.hint


@pytest.mark.parametrize(
    "content",
    ["\ufeffdef make_job(): ...\n".encode("utf-16-le"), b"# coding: nonsense\ndef make_job(): ...\n", b"# caf\xe9\n"],
)
def test_a_job_that_python_can_not_decode_is_refused_with_its_file_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.py").write_bytes(content)
    with pytest.raises(JobError, match=r"job\.py is not valid Python: .*encoding") as refused:
        parse_jobref(str(tmp_path / "job.py"))
    assert refused.value.where == str(tmp_path / "job.py")


@pytest.mark.parametrize(
    "told, rank", [({}, 0), ({"RANK": "3"}, 3), ({"RANK": "x"}, 0), ({"RANK": ""}, 0), ({"RANK": "\u00b2"}, 0)]
)
def test_a_rank_that_is_no_number_hides_no_refusal(told: dict[str, str], rank: int) -> None:
    """The refusal of such a world itself asks for the rank."""
    assert own_rank(told) == rank
