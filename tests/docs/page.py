"""A page as the runner reads it: blocks, and the marks that stand on the line above them.

`<!-- key: value; key: value -->`, any of:

    file: job.py          written to the page's folder, not run
    needs: accelerate     modules or programs; the page's second test runs these, or is skipped and says why
    exit: 4               the exit code that the block ends with
    not run: reason       for what no test can run
    output                a ```text block: its lines are lines of what the block before it printed, numbers aside
    output: with its numbers
"""

import importlib
import importlib.util
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
KEYS = {"file", "needs", "exit", "not run", "output"}
_BLOCK = re.compile(r"(?:^<!-- (?P<marks>[^>]*?) -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.S | re.M)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?|\b[0-9a-f]{16}\b")


def part_of_site(name: str) -> ModuleType:
    """Import a module of `docs/sphinx_ext`, which is no installed package."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    return importlib.import_module(f"sphinx_ext.{name}")


def _has_blocks_of_its_own(page: Path) -> bool:
    """Return False for the lists of pages, and for pages that show a file of another folder."""
    return page.name not in part_of_site("navigation").PARTS and "<!-- include: " not in page.read_text()


PAGES = [ROOT / "README.md", *filter(_has_blocks_of_its_own, sorted(DOCS.glob("*.md")))]


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    kind: str
    body: str
    line: int
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(word.strip() for word in self.marks.get("needs", "").split(",") if word.strip())


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        marks = dict(_mark(part) for part in (match["marks"] or "").split(";") if part.strip())
        assert set(marks) <= KEYS, f"{page.name}: {set(marks) - KEYS} is no mark"
        line = text[: match.start()].count("\n") + 1
        found.append(Block(kind=match["kind"], body=match["body"], line=line, marks=marks))
    return found


def missing(needs: tuple[str, ...]) -> list[str]:
    """What is neither a module nor a program here."""
    return [word for word in needs if importlib.util.find_spec(word) is None and shutil.which(word) is None]


def unlike(shown: str, printed: str, *, numbers: bool = False) -> list[str]:
    """Lines of a shown output that were not printed, spaces aside, and numbers unless they count; `...` stands for any."""
    told = (lambda line: " ".join(line.split())) if numbers else _plain
    have = {told(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if line.strip() not in ("", "...") and told(line) not in have]


def _mark(part: str) -> tuple[str, str]:
    key, _, value = part.strip().partition(":")
    return key.strip(), value.strip()


def _plain(line: str) -> str:
    return _NUMBER.sub("#", " ".join(line.split()))
