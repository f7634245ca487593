"""The order of the pages, read from the lists of links in the navigation pages.

A navigation page is plain Markdown, readable on a code host. Each item of its lists is one entry of its toctree:

    - [Quick start](quickstart.md): One sentence.

This module imports no Sphinx, so the tests of the pages use it too.
"""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
FRONT = "index.md"
PARTS = ("tutorials.md", "howto.md", "concepts.md", "reference.md")
NAVIGATION = (FRONT, *PARTS, "api.md")
_ITEM = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[\w-]+\.md)\): (?P<sentence>.+?)$(?P<more>(?:\n  .+$)*)", re.M)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One item of a navigation page."""

    page: str
    title: str
    sentence: str


def entries(page: str) -> list[Entry]:
    """Return the entries of a navigation page, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        Entry(page=m["page"], title=m["title"], sentence=" ".join((m["sentence"] + m["more"]).split()))
        for m in _ITEM.finditer(text)
    ]


def toctree(page: str) -> str:
    """Return the hidden toctree that follows from the lists of a navigation page."""
    names = "\n".join(f"{entry.title} <{entry.page.removesuffix('.md')}>" for entry in entries(page))
    return f"\n:::{{toctree}}\n:hidden:\n\n{names}\n:::\n"
