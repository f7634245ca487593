"""A page as Sphinx reads it, and the same page as plain Markdown for programs that read text.

HTML comments in a page are instructions to the builder. On GitHub they are invisible:

    <!-- include: ../CHANGELOG.md -->     this file is the page
    <!-- build: commands -->              what `generated_reference` makes; also `settings`
    <!-- build: api train -->             the signature and docstring of `paceline.train`
    <!-- build: names train verify -->    a table of these names, one line each

The marks of `tests/docs/page.py` are left out; a `file:` mark becomes the caption of its block.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from sphinx_ext import generated_reference
from sphinx_ext.links import as_html, as_twin, relink
from sphinx_ext.navigation import DOCS, toctree

_INCLUDE = re.compile(r"<!-- include: (?P<file>\S+) -->")
_BUILD = re.compile(r"^<!-- build: (?P<what>\w+) ?(?P<names>[^>]*?) -->$", re.M)
_MARK = re.compile(r"^<!-- (?P<mark>(?:file|needs|exit|not run|output|matrix)\b[^>]*) -->\n(?P<fence>```\w*$)?", re.M)


def for_sphinx(page: str, text: str) -> str:
    """Return the text that Sphinx parses in place of the page's own."""
    text = _with_links(page, text, as_html)
    text = _BUILD.sub(lambda m: _directives(m["what"], m["names"].split()), text)
    text = _MARK.sub(_dressed, text)
    return text + toctree(page)


def for_twin(page: str) -> str:
    """Return the page as Markdown without directives; generated parts are written out."""
    text = _with_links(page, (DOCS / page).read_text(encoding="utf-8"), as_twin)
    text = _BUILD.sub(lambda m: _written_out(m["what"], m["names"].split()), text)
    return _MARK.sub(lambda m: m["fence"] or "", text)


def _with_links(page: str, text: str, outside: Callable[..., str]) -> str:
    base = DOCS
    if match := _INCLUDE.search(text):
        file = (DOCS / match["file"]).resolve()
        text, base = file.read_text(encoding="utf-8"), file.parent
    return relink(text, base=base, outside=outside)


def _dressed(match: re.Match[str]) -> str:
    """Return the fence below a mark, with a caption or the class of an output."""
    fence = match["fence"] or ""
    if not fence:
        return ""
    marks = dict(part.strip().partition(":")[::2] for part in match["mark"].split(";"))
    if "output" in marks:
        return "{.output}\n" + fence
    language = fence.removeprefix("```") or "text"
    return f"```{{code-block}} {language}\n:caption: {marks['file'].strip()}\n" if "file" in marks else fence


def _generated(what: str) -> str:
    return {"commands": generated_reference.commands, "settings": generated_reference.settings}[what]()


def _directives(what: str, names: list[str]) -> str:
    if what == "names":
        rows = "".join(f"   paceline.{name}\n" for name in names)
        return f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{rows}```"
    if what == "api":
        return "```{eval-rst}\n" + "\n".join(_directive(name) for name in names) + "```"
    return _generated(what)


def _directive(name: str) -> str:
    """Return the autodoc directive of a public name, or of a class that one of them returns."""
    found = _found(name)
    if inspect.ismodule(found):
        return f".. automodule:: paceline.{name}\n"
    full = f"paceline.{name}"
    if not inspect.isclass(found):
        return f".. autofunction:: {full}\n" if callable(found) else f".. autodata:: {full}\n   :no-value:\n"
    if issubclass(found, BaseException):
        return f".. autoexception:: {full}\n   :show-inheritance:\n"
    members = "" if name in ("Job", "World", "EarlyStopping") else "   :members:\n   :undoc-members:\n"
    return f".. autoclass:: {full}\n{members}"


def _found(name: str) -> Any:
    found: Any = importlib.import_module("paceline")
    for part in name.split("."):
        found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")
    return found


def _written_out(what: str, names: list[str]) -> str:
    if what == "names":
        return "\n".join(f"- `pl.{name}`: {_first_line(_found(name))}" for name in names)
    if what == "api":
        return "\n\n".join(_signature_and_docstring(name) for name in names)
    return _generated(what)


def _first_line(found: Any) -> str:
    return (inspect.getdoc(found) or "").partition("\n")[0]


def _signature_and_docstring(name: str) -> str:
    found = _found(name)
    is_error = inspect.isclass(found) and issubclass(found, BaseException)
    try:
        given = "" if is_error or not callable(found) else str(inspect.signature(found))
    except ValueError:
        given = ""
    if inspect.isclass(found) and is_dataclass(found):
        given = plain_signature(found)
    text = "" if isinstance(found, str) else inspect.getdoc(found) or ""
    return f"```text\npaceline.{name}{given}\n\n{text}\n```"


def plain_signature(found: type) -> str:
    """Return the arguments of a dataclass without types: the page of the class explains them."""
    required = ("model", "train_data", "optimizer", "global_batch_size") if found.__name__ == "Job" else ()
    given = list(inspect.signature(found.__init__).parameters.values())[1:]  # type: ignore[misc]
    words = [
        one.name if one.default is one.empty or one.name in required else f"{one.name}={one.default!r}"
        for one in given
        if "factory" not in repr(one.default)
    ]
    return f"(*, {', '.join(words)})"
