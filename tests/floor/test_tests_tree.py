"""The tests mirror the package: an engineer finds the tests of a module in the folder with the same name."""

from pathlib import Path

import pytest

from tests.quick import QUICK, is_quick

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "src" / "paceline"
OTHERS = ("docs", "end_to_end", "floor", "matrix", "warm")
"""Folders that mirror no package: pages, whole runs, the shape of the code, models times layouts, and a fixture."""
FILES = sorted(path for path in TESTS.rglob("*.py") if path.stem not in ("__init__", "__main__", "conftest"))


@pytest.mark.parametrize("folder", sorted({str(path.parent.relative_to(TESTS)) for path in FILES}))
def test_each_folder_is_one_of_the_package(folder: str) -> None:
    assert folder in OTHERS or (PACKAGE / folder).is_dir(), f"src/paceline has no folder {folder}"
    assert (TESTS / folder / "__init__.py").exists(), f"tests/{folder} has no __init__.py"


def test_a_file_name_is_there_once() -> None:
    """A test report shows base names."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        found.setdefault(path.stem, []).append(str(path.relative_to(TESTS)))
    assert {stem: paths for stem, paths in found.items() if len(paths) > 1} == {}


def test_a_folder_has_at_most_twenty_files() -> None:
    for folder in {path.parent for path in FILES}:
        assert len(list(folder.glob("*.py"))) - 1 <= 20, folder.relative_to(TESTS)


@pytest.mark.parametrize("entry", QUICK)
def test_the_quick_lane_lists_what_is_there(entry: str) -> None:
    assert (TESTS / entry).exists()


def test_the_quick_lane_is_a_file_or_a_whole_folder() -> None:
    assert is_quick("floor/test_tests_tree.py") and is_quick("floor/test_tests_tree.py::test_a_file_name_is_there_once")
    assert not is_quick("end_to_end/test_random_kills.py")
