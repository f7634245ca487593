"""The site of the docs: each page has its place, each public name an example, each option and setting a row. No Sphinx."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.commands.command_table import VERBS
from paceline.config.merge_settings import known_settings
from tests.docs.page import DOCS, ROOT, blocks, part_of_site

LINK = re.compile(r"\]\((?:docs/)?([\w-]+\.md)[^)]*\)")


navigation: Any = part_of_site("navigation")


def test_every_page_is_in_exactly_one_list_of_a_part() -> None:
    pages = {page.name for page in DOCS.glob("*.md")} - {navigation.FRONT}
    listed = Counter(entry.page for page in (navigation.FRONT, *pages) for entry in navigation.children(page))
    assert sorted(pages - set(listed)) == [], (
        "add each to a list of tutorials.md, howto.md, concepts.md or reference.md"
    )
    assert sorted(set(listed) - pages) == [], "listed and not there"
    assert {page: count for page, count in listed.items() if count > 1} == {}


def test_the_lists_of_the_parts_hold_nothing_else() -> None:
    for page in navigation.NAVIGATION:
        items = re.findall(r"^- ", (DOCS / page).read_text(), re.M)
        assert len(items) == len(navigation.entries(page)), f"{page}: an item is `- [Title](page.md): One sentence.`"
        for entry in navigation.entries(page):
            assert entry.sentence.endswith("."), f"{page}: {entry.title} has no sentence"


def test_every_page_can_be_reached_from_the_readme_or_the_front_page() -> None:
    seen: set[str] = set()
    ahead = {navigation.FRONT, *LINK.findall((ROOT / "README.md").read_text())}
    while ahead:
        name = ahead.pop()
        if name not in seen and (DOCS / name).exists():
            seen.add(name)
            ahead |= set(LINK.findall((DOCS / name).read_text())) - seen
    assert sorted({page.name for page in DOCS.glob("*.md")} - seen) == []


def entries_of_reference() -> dict[str, tuple[Path, str]]:
    """Return each heading of the API pages that is a public name, with its page and its text."""
    found = {}
    for page in sorted(DOCS.glob("api-*.md")):
        for part in re.split(r"^##+ ", page.read_text(), flags=re.M)[1:]:
            heading, _, text = part.partition("\n")
            if match := re.fullmatch(r"`pl\.(\w+)`", heading):
                assert match[1] not in found, f"pl.{match[1]} has two entries"
                found[match[1]] = (page, text)
    return found


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    assert sorted(entries_of_reference()) == sorted(pl.__all__)


@pytest.mark.parametrize("name", pl.__all__)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    page, text = entries_of_reference()[name]
    assert name == "__version__" or f"<!-- build: api {name} -->" in text, f"pl.{name} does not show its docstring"
    code = [block.body for block in blocks(page) if block.kind == "python" and "not run" not in block.marks]
    if name == "hf":  # whose example is that of `pl.hf.job`
        text = page.read_text()
    assert any(f"pl.{name}" in body and body in text for body in code), f"pl.{name} has no example"


def test_every_public_name_is_in_the_tables_of_the_reference() -> None:
    listed = re.findall(r"<!-- build: names ([^>]*) -->", (DOCS / "api.md").read_text())
    assert sorted(" ".join(listed).split()) == sorted(set(pl.__all__) - {"__version__"})


def test_the_generated_reference_has_every_option_and_setting() -> None:
    generated: Any = part_of_site("generated_reference")
    commands, settings = generated.commands(), generated.settings()
    for name, verb in VERBS.items():
        section = commands.partition(f"### `paceline {name}`\n")[2].partition("\n### ")[0]
        words = [
            (f"`--{field.replace('_', '-')}`", f"`{field.upper()}`")
            for field in verb.option_class().__dataclass_fields__
        ]
        assert [pair for pair in words if pair[0] not in section and pair[1] not in section] == [], name
    assert [name for name in known_settings() if f"| `{name}` |" not in settings] == []
    assert "Number of processes on this machine; default: the ranks that the sizes in `--layout` need" in commands
    assert "| `train.precision` | `fp32`, `bf16`, `fp16` | `fp32` |" in settings


def test_pictures_are_those_that_their_script_draws() -> None:
    code = "import draw_layouts as d; print(*[f'{n}\\t{d.picture(p)}' for n, p in d.PICTURES.items()], sep='', end='')"
    drawn = subprocess.run(
        [sys.executable, "-c", code], cwd=DOCS / "pictures", capture_output=True, text=True, check=True
    )
    for line in drawn.stdout.splitlines():
        name, _, picture = line.partition("\t")
        assert (DOCS / "pictures" / f"holds-{name}.svg").read_text().strip() == picture, name


def test_links_out_of_the_docs_lead_to_pages_of_the_site() -> None:
    pytest.importorskip("pygments")
    pytest.importorskip("markdown_it")
    links: Any = part_of_site("links")
    text = (
        "See [an example](../examples/demo.sh), [words](../GLOSSARY.md#x) and [a page](loss.md).\n```\n[a](../x)\n```"
    )
    found = links.relink(text, base=DOCS, outside=links.as_html)
    assert '<a class="reference internal" href="files/examples/demo.sh.html">an example</a>' in found
    assert "[words](glossary.md#x) and [a page](loss.md)" in found
    assert "```\n[a](../x)\n```" in found
