"""Every name of paceline that a page's Python block, a benchmark or an example uses exists.

`make check` runs this, while it leaves out the tests that run the blocks and the benchmarks themselves.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from tests.docs.page import PAGES, ROOT, blocks

SCRIPTS = [path for folder in ("benchmarks", "examples", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]


def unknown_names(tree: ast.AST) -> Iterator[str]:
    """Yield what is imported from paceline, or read from `pl`, and is not there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "paceline":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name) and not _is_module(f"{node.module}.{alias.name}"):
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("paceline") and not _is_module(a.name))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pl":
            yield from () if hasattr(paceline, node.attr) else (f"pl.{node.attr}",)


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_in_the_blocks_of_a_page_exist(page: Path) -> None:
    python = [block for block in blocks(page) if block.kind == "python"]
    unknown = [f"{page.name}:{block.line}: {name}" for block in python for name in unknown_names(ast.parse(block.body))]
    assert not unknown


def test_names_in_scripts_exist() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}: {name}" for path in SCRIPTS for name in unknown_names(ast.parse(path.read_text()))
    ]
    assert not unknown


def test_a_name_that_is_gone_is_found() -> None:
    text = "import paceline as pl\nfrom paceline.errors import PacelineError, Gone\nimport paceline.gone\npl.Job(pl.gone)\n"
    assert set(unknown_names(ast.parse(text))) == {"paceline.errors.Gone", "paceline.gone", "pl.gone"}
