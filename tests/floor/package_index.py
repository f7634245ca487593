"""The docstring of each package: what it is for, which file to read first, and a list of its files.

    python -m tests.floor.package_index      # update the lists after a file or its docstring changed

The list repeats the first sentence of each file's docstring. `test_package_index.py` checks that it is up to date.
"""

import ast
import re
import textwrap
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"
WIDTH = 120
_START = re.compile(r"^Start with `([^`]+)`\.", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z`])")


def packages() -> list[Path]:
    """Return the folder of every package, parents first."""
    return sorted(path.parent for path in SOURCE.rglob("__init__.py"))


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return _SENTENCE_END.split(" ".join(docstring.split("\n\n")[0].split()))[0]


def start_file(folder: Path) -> str | None:
    """Return the file that the package's docstring recommends to read first, relative to the package."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    found = _START.search(docstring)
    return found and found[1]


def members(folder: Path) -> list[tuple[str, Path]]:
    """Return the name and the file with the docstring of each module and subpackage."""
    modules = [(path.name, path) for path in folder.glob("*.py") if path.name != "__init__.py"]
    subpackages = [(f"{path.parent.name}/", path) for path in folder.glob("*/__init__.py")]
    return sorted(modules) + sorted(subpackages)


def expected_docstring(folder: Path) -> str:
    """Return the docstring of a package with an up-to-date list of its files."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    introduction = _START.split(docstring)[0].rstrip()
    lines = [
        textwrap.fill(
            f"- `{name}`: {first_sentence(path)}",
            WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, path in members(folder)
    ]
    return f"{introduction}\n\nStart with `{start_file(folder)}`.\n\n" + "\n".join(lines)


def write() -> None:
    """Update the list of every package. Inner packages come first, because outer ones quote them."""
    for folder in reversed(packages()):
        path = folder / "__init__.py"
        text = path.read_text()
        end = ast.parse(text).body[0].end_lineno or 0
        rest = text.splitlines(keepends=True)[end:]
        path.write_text(f'"""{expected_docstring(folder)}\n"""\n' + "".join(rest))


if __name__ == "__main__":
    write()
