"""Links that leave docs/: to pages that show the other files of the repository, inside the site.

The pages link to files as GitHub and similar sites need it (`../examples/text.py`). The site has a page for each linked
file, under `files/`, so no link depends on where the repository is.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from sphinx_ext.navigation import DOCS

ROOT = DOCS.parent
PAGES_OF_ROOT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "GLOSSARY.md": "glossary.md",
}
_LINK = re.compile(
    r"(?<!!)\[(?P<text>(?:[^\[\]]|!?\[[^\]]*\](?:\([^)]*\))?)*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)
_FENCE = re.compile(r"^(?:```|~~~|:::)")
Rewrite = Callable[[str, Path, str], str]
"""Of (link text, file outside docs/, anchor)."""


def relink(text: str, *, base: Path, outside: Rewrite) -> str:
    """Return a page of the folder `base` as a page of docs/: links to other files go through `outside`."""

    def link(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        found = (base / target).resolve()
        if not found.exists():
            return match[0]  # Sphinx warns
        if found.is_relative_to(DOCS):
            return f"[{match['text']}]({found.relative_to(DOCS)}{match['anchor'] or ''})"
        page = PAGES_OF_ROOT.get(str(found.relative_to(ROOT))) if found.is_relative_to(ROOT) else None
        if page:
            return f"[{match['text']}]({page}{'' if page == 'index.md' else match['anchor'] or ''})"
        return outside(match["text"], found, match["anchor"] or "")

    return "\n".join(part if is_code else _LINK.sub(link, part) for part, is_code in _parts(text))


def _parts(text: str) -> Iterable[tuple[str, bool]]:
    """Split a page into prose and code; a link's text may go over a line's end."""
    lines: list[str] = []
    is_code = False
    for line in text.split("\n"):
        if _FENCE.match(line):
            if not is_code:
                yield "\n".join(lines), False
                lines = [line]
            else:
                yield "\n".join([*lines, line]), True
                lines = []
            is_code = not is_code
        else:
            lines.append(line)
    yield "\n".join(lines), is_code


def page_name(file: Path) -> str:
    """Return the name of the page that shows a file of the repository."""
    return f"files/{file.relative_to(ROOT)}"


def as_html(text: str, file: Path, anchor: str) -> str:
    """Return a link to the page that shows a file; Markdown in its text stays."""
    return f'<a class="reference internal" href="{page_name(file)}.html{anchor}">{text}</a>'


def as_twin(text: str, file: Path, _: str) -> str:
    """Return a link to the copy of a file that lies next to the Markdown twins."""
    return f"[{text}]({page_name(file)}{'.html' if file.is_dir() else ''})"


def linked_files() -> list[Path]:
    """Return every file and folder outside docs/ that a page links to, and the files of these folders."""
    found: set[Path] = set()

    def note(text: str, file: Path, _: str) -> str:
        found.add(file)
        found.update(child for child in (file.iterdir() if file.is_dir() else ()) if child.is_file())
        return text

    pages = [*DOCS.glob("*.md"), *(ROOT / name for name in PAGES_OF_ROOT)]
    for page in pages:
        relink(page.read_text(encoding="utf-8"), base=page.parent, outside=note)
    return sorted(found)


def file_page(file: Path, *, files: Iterable[Path]) -> tuple[str, dict[str, Any], str]:
    """Return (page name, context, template) of the page that shows a file or a folder."""
    name = str(file.relative_to(ROOT))
    up = "../" * (page_name(file).count("/"))

    def other(text: str, target: Path, anchor: str) -> str:
        return f"[{text}]({up}{page_name(target)}.html{anchor})" if target in set(files) else text

    if file.is_dir():
        inside = sorted(child.name for child in file.iterdir() if child.is_file())
        body = "".join(f'<li><a href="{file.name}/{child}.html"><code>{child}</code></a></li>' for child in inside)
        body = f"<ul>{body}</ul>"
    elif file.suffix == ".md":
        text = relink(file.read_text(encoding="utf-8"), base=file.parent, outside=other)
        text = re.sub(r"\]\(([\w-]+)\.md(#[^)]*)?\)", rf"]({up}\1.html\2)", text)
        made = MarkdownIt("commonmark").enable("table").render(text)
        made = re.sub(r"<h([1-4])>(.*?)</h\1>", _with_id, made)
        made = re.sub(r"(?<!<pre>)<code>", '<code class="literal">', made)
        body = made.replace("<table>", '<div class="table-wrapper"><table class="docutils">')
        body = body.replace("</table>", "</table></div>")
    else:
        body = _highlighted(file)
    head = "" if file.suffix == ".md" else f"<h1><code>{name}</code></h1>"
    return page_name(file), {"title": name, "body": head + body, "parents": [], "toc": ""}, "page.html"


def _with_id(heading: re.Match[str]) -> str:
    """Return a heading with the anchor that GitHub gives it."""
    slug = re.sub(r"[^\w\- ]", "", re.sub(r"<[^>]*>", "", heading[2]).lower()).replace(" ", "-")
    return f'<h{heading[1]} id="{slug}">{heading[2]}</h{heading[1]}>'


def _highlighted(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        lexer = get_lexer_for_filename(file.name)
    except ClassNotFound:
        lexer = TextLexer()
    return f'<div class="highlight-python notranslate">{highlight(text, lexer, HtmlFormatter())}</div>'
