"""The pages name files and Python names that exist: a file that moves, or a name that changes, changes its pages too."""

import re
from dataclasses import is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import paceline as pl

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "paceline"
TOP = ("ARCHITECTURE.md", "CONTRIBUTING.md", "GLOSSARY.md", "README.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
FOLDERS = {"src", "tests", "docs", "examples", "benchmarks"}
PACKAGES = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
SUFFIXES = (".py", ".md", ".toml", ".txt", ".sh", ".svg", ".css")
NAME = re.compile(r"(?<![\w./])(?:paceline|pl)(?:\.[A-Za-z_]\w*)+(?![\w/*])")


def named_files(page: Path) -> set[str]:
    """Return each word in backticks that looks like a file or folder of the repository or of the package."""
    text, found = FENCE.sub("", page.read_text()), set()
    for word in (word for code in CODE.findall(text) for word in code.split()):
        path = re.sub(r"(::.*|:\d+)$", "", word.strip(",;:()[]\"'"))
        first, slash, _ = path.partition("/")
        is_file = path.endswith((*SUFFIXES, "/"))
        if (
            (slash and first in FOLDERS)
            or (slash and first in PACKAGES and is_file)
            or re.fullmatch(r"test_\w+\.py", path)
            or (page.name in TOP and not slash and path.endswith(SUFFIXES))
        ):
            found.add(path)
    return found


def exists(path: str) -> bool:
    """Return whether a path, which may have `*` in it, is in the repository, the package, or the folders of tests."""
    return any(next(base.glob(path.rstrip("/")), None) for base in (ROOT, PACKAGE, ROOT / "docs")) or (
        path.startswith("test_") and any((ROOT / "tests").rglob(path))
    )


def unresolved(name: str) -> bool:
    """Return whether a dotted name is neither a module, nor an attribute, nor a field of a dataclass."""
    name = re.sub(r"^pl\b", "paceline", name)
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        owner, _, last = name.rpartition(".")
        try:
            found: Any = resolve_name(owner)
        except (ImportError, AttributeError):
            return True
        return not (is_dataclass(found) and last in found.__dataclass_fields__)
    return False


def test_the_first_page_stays_short() -> None:
    """What does not fit belongs on a page of its own."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert sorted(path for path in named_files(page) if not exists(path)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_names_of_a_page_resolve(page: Path) -> None:
    assert sorted(name for name in set(NAME.findall(page.read_text())) if unresolved(name)) == []


def test_these_checks_find_a_wrong_name(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(
        "`src/paceline/nowhere.py`, `step/synchronous.py`, `tests/floor` and `cause=...`\n```\n`docs/x.md`\n```\n"
    )
    assert {path for path in named_files(page) if not exists(path)} == {"src/paceline/nowhere.py"}
    assert named_files(page) >= {"step/synchronous.py", "tests/floor"}
    assert not unresolved("pl.Job.model") and not unresolved("paceline.schedule.registry") and unresolved("pl.Jobb")
    assert pl.Job is not None
