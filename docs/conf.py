"""Sphinx configuration. `make docs` builds the site into build/docs/html."""

import inspect
import shutil
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from docutils import nodes

import paceline
from sphinx_ext.links import file_page, linked_files, page_name
from sphinx_ext.navigation import NAVIGATION, PARTS, children, entries
from sphinx_ext.source import for_sphinx, for_twin, plain_signature

project = "Paceline"
author = "The Paceline authors"
project_copyright = author
version = release = paceline.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["sphinx_ext", "pictures", "_static", "build"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may begin a list of parts with a third-level heading

default_role = "code"
add_module_names = False
autosummary_generate = False
autodoc_default_options = {"exclude-members": "worker, open, is_due, named, write, print_gradient"}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries = False

smartquotes = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"Paceline {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "source_view_link": "{filename}",
    "top_of_page_buttons": ["view"],
}
copybutton_selector = "div:not(.output) > div.highlight > pre"
copybutton_exclude = ".linenos, .gp"


def read_source(app: Any, docname: str, source: list[str]) -> None:
    """Give Sphinx the page with its generated parts; a page that is made of other files is always read again."""
    if "<!-- include: " in source[0] or "<!-- build: " in source[0] or f"{docname}.md" in NAVIGATION:
        app.env.note_reread()
    source[0] = for_sphinx(f"{docname}.md", source[0])


def sign_dataclass(
    app: Any, what: str, name: str, found: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None] | None:
    """Show a dataclass with the arguments of its constructor, also where it has a `__new__` of its own."""
    if what == "class" and name.count(".") > 1:  # what a function returns: nobody calls its constructor
        return "", None
    if what == "class" and is_dataclass(found) and isinstance(found, type):
        return plain_signature(found), None
    return None


def plain_dashes(app: Any, doctree: nodes.document) -> None:
    """Put a dash between a parameter and its text, as `smartquotes` would; it would also change `--options`."""
    for text in doctree.findall(nodes.Text):
        if str(text) == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def collect_file_pages(app: Any) -> Any:
    """Yield a page for each file outside docs/ that a page links to."""
    files = linked_files()
    for file in files:
        yield file_page(file, files=files)


def name_twin(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Name the Markdown twin in the page's head."""
    if doctree is not None:
        context["metatags"] += f'<link rel="alternate" type="text/markdown" href="{pagename}.md">'


def write_twins(app: Any, error: Exception | None) -> None:
    """Write the Markdown twin of each page, the linked files, and llms.txt, which lists all pages."""
    if error is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    for page in app.env.found_docs:
        (out / f"{page}.md").write_text(for_twin(f"{page}.md"), encoding="utf-8")
    for file in (one for one in linked_files() if one.is_file()):
        shutil.copyfile(file, out / page_name(file))
    shutil.copytree(Path(app.srcdir) / "pictures", out / "pictures", dirs_exist_ok=True)
    lines = ["# Paceline", "", f"> {inspect.getdoc(paceline)}", ""]
    for part in PARTS:
        title = (Path(app.srcdir) / part).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        listed = [one for entry in entries(part) for one in (entry, *children(entry.page))]
        lines += [f"## {title}", "", *(f"- [{one.title}]({one.page}): {one.sentence}" for one in listed), ""]
    (out / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("source-read", read_source)
    app.connect("autodoc-process-signature", sign_dataclass)
    app.connect("doctree-read", plain_dashes)
    app.connect("html-collect-pages", collect_file_pages)
    app.connect("html-page-context", name_twin)
    app.connect("build-finished", write_twins)
