"""The order of the pages, read from the lists of links in the navigation pages.

A navigation page is plain Markdown, so it is also readable on GitHub. Each list item is one entry of its toctree:

    - [Quick start](quickstart.md): One sentence.

A page `NAME-details.md` belongs to `NAME.md` and is in no list.

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


def children(page: str) -> list[Entry]:
    """Return the pages below a page: its list, if it is a navigation page, and its details."""
    details = DOCS / page.replace(".md", "-details.md")
    found = entries(page) if page in NAVIGATION else []
    if details.exists():
        title = details.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        found.append(Entry(page=details.name, title=title, sentence=f"More about {page}."))
    return found


def toctree(page: str) -> str:
    """Return the hidden toctree of the pages below a page, or nothing."""
    names = "\n".join(f"{entry.title} <{entry.page.removesuffix('.md')}>" for entry in children(page))
    return f"\n:::{{toctree}}\n:hidden:\n\n{names}\n:::\n" if names else ""
