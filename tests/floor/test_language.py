"""The code base reads as the field writes: no everyday words as names, no clipped docstrings, no archaic phrases."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.floor.test_house import FILES, PACKAGE, ROOT, syntax_tree

pytestmark = pytest.mark.one_worker

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# Participles, prepositions, pronouns and adverbs: alone they say neither what a thing is nor what a function does.
NO_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
    about above after again against alike alone along aloud already also among anew any apart apiece around as aside asked at away
    become been before began begun behind below beside besides better between beyond both built but by came carried chosen come done
    each  either else even ever every everybody everyone everything everywhere few for found from gave given gone good had has
    have he hear heard held her here hers him his how however inside into it its just kept knew know known laid  late later least
    left less lent    lone longer lost made many maybe mine more most much near nearer neither never nobody none nor
    nothing now of off often on once one only onto or   ought our  outside over own owns past per perhaps  quite
    rather said same saw say says see seen settle settled several shall since so some somebody something soon still such taken tell
    tells than that their theirs them then there therefore these they thing things this those though through thus till to together
    told too toward towards twice under until unto up upon us very was we well went were what when whence  whether which while
    who whole wholes whom whose why with within without yes yet you
    """,
    )
)

# Words that may stay: settings, options of a command, arguments of the public API, keys of files and of JSON, and
# PyTorch's own argument names. A word that is in no file any more is taken out, which a test demands.
MEANT = {
    "after": "the two sides of a difference", "before": "the two sides of a difference",
    "again": "a key of the plan's JSON", "against": "--against", "alone": "World.alone()",
    "asked": "a key of plan.json", "at": "a key of the manifest", "between": "a key of a cluster's JSON",
    "every": "checkpoint.every, eval.every, --every",
    "good": "ckpt verify --good", "has": "a predicate's prefix", "held": "a message's argument",
    "inside": "a key of a cluster's JSON", "kept": "a key of the model profile", "known": "a cache's argument",
    "longer": "a key of the calibration", "many": "verify-script --many",
    "once": "run once and remember", "one": "one of two that are compared",
    "only": "ckpt diff --only", "own": "a key of the contention's JSON", "owns": "a predicate",
    "said": "a key of failure.json", "seen": "a microbatch's argument", "since": "a key of the hooks' record",
    "to": "--to, and PyTorch's send(to)", "told": "a key of events.jsonl", "until": "a key of compare.json",
    "what": "PacelineError.what", "whole": "a key of the manifest",
}  # fmt: skip

NO_PHRASES = {
    r'\banew\b(?!")': "again",
    r"\breckon": "estimate, count",
    r"\bgone on with\b|\bgoe?s? on with\b": "continue, resume",
    r"\bin the place of\b": "instead of",
    r"\bof which (none|no)\b": "none of which",
    r"\b(be|is|are|was) had\b": "is available",
    r"\b(is|are|was|be) (told|heard)\b": "is reported, receives",
    r"\bheld against\b": "compared with",
    r"\b(whereof|thereby|therein|thereof|whence|hitherto|likewise)\b": "plain words",
    r"\bbegin(s|ning)? again\b|\bbegan again\b": "restart",
}

FRAGMENTS = frozenset(
    re.findall(
        r"\w+",
        "Of As From In Where Whether Those If When With By For To On At How Why Which Who That What But And Or Since Until",
    )
)


def declared_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each public function, class, method, attribute, parameter and constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                yield argument.lineno, argument.arg
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.lineno, field.target.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside its blocks, or the comments and strings of a Python file."""
    if path.suffix == ".md":
        is_block = False
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            is_block ^= line.startswith("```")
            if not is_block:
                yield number, line
    else:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            yield number, line


def test_no_name_is_an_everyday_word_alone() -> None:
    found = defaultdict(list)
    for path in FILES:
        for line, name in declared_names(syntax_tree(path)):
            if not name.startswith("_") and name.lower() in NO_NAMES:
                found[name].append(f"{path.relative_to(PACKAGE)}:{line}")
    unexpected = {name: places for name, places in found.items() if name not in MEANT}
    assert not unexpected, "\n".join(f"{name}: {', '.join(places)}" for name, places in sorted(unexpected.items()))
    assert sorted(MEANT) == sorted(found), "a word that nobody uses any more is taken out of MEANT"


def test_no_phrase_is_archaic() -> None:
    any_phrase = re.compile("|".join(f"(?:{phrase})" for phrase in NO_PHRASES), re.IGNORECASE)
    found = [
        f"{path.name}:{number}: {match[0]!r}; write {better!r}"
        for path in [*FILES, *PAGES]
        for number, line in prose_of(path)
        if any_phrase.search(line)
        for phrase, better in NO_PHRASES.items()
        if (match := re.search(phrase, line, re.IGNORECASE))
    ]
    assert not found, "\n".join(found)


def docstring_fault(node: ast.AST, text: str) -> str:
    """Return what is wrong with a docstring, or nothing."""
    first = text.split()[0]
    if not (first[0].isupper() or not first[0].isalpha() or "_" in first or "." in first) or first in FRAGMENTS:
        return "a fragment"
    if not text.splitlines()[0].rstrip().endswith((".", ":", "?")) and "\n\n" in text:
        return "does not end"
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        return (
            "an imperative"
            if first in ("Returns", "Gets", "Computes", "Yields", "Raises", "Checks", "Runs", "Makes")
            else ""
        )
    return ""


def test_docstrings_are_sentences() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]!r}: {fault}"
        for path in FILES
        for node, text in docstrings(syntax_tree(path))
        if (fault := docstring_fault(node, text))
    ]
    assert not found, "\n".join(found)


def test_a_public_name_says_one_thing() -> None:
    """A verb may have its command, its Python function and its entry in the ranks; no other public name is there twice."""
    found = defaultdict(set)
    for path in FILES:
        for node in syntax_tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(str(path.relative_to(PACKAGE)))
    twins = {"main", "run_verb"}
    verbs = "commands/python_functions.py"
    double = {
        name: sorted(paths) for name, paths in found.items()
        if len(paths) > 1 and name not in twins and verbs not in paths
    }  # fmt: skip
    assert double == {}
