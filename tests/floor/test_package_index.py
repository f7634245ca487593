"""Each package's docstring lists its files, and names the one to read first."""

import ast
from pathlib import Path

import pytest

from tests.floor.package_index import SOURCE, expected_docstring, packages, start_file


@pytest.mark.parametrize("folder", packages(), ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_package_docstring_lists_its_files(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert docstring == expected_docstring(folder), "python -m tests.floor.package_index updates the list"
    start = start_file(folder)
    assert start is not None and (folder / start).is_file(), f"{folder}: Start with `...` names no file"
