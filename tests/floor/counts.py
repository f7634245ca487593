"""Counts of a source tree: its size, the width of its folders, and what breaks the rules of style.

    python -m tests.floor.counts                                   # this tree
    python -m tests.floor.counts /path/to/checkout PYTHON          # another one, which PYTHON imports

The rules are those of `test_language.py`. The files entered by a step, a fetch and a save are counted by
`one_step.py` on two ranks of plain ddp.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.floor.test_language import FRAGMENTS, NO_NAMES, NO_PHRASES, declared_names, docstrings, prose_of

HERE = Path(__file__).resolve().parents[2]


def static_counts(root: Path) -> dict[str, int]:
    """Return the counts that need no process."""
    package = root / "src" / "paceline"
    files = sorted(package.rglob("*.py"))
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    trees = [ast.parse(path.read_text()) for path in files]
    stems = Counter(path.stem for path in files if path.stem not in {"__init__", "__main__"})
    first_words = [text.split()[0] for tree in trees for _, text in docstrings(tree)]
    lines = [line for path in [*files, *pages] for _, line in prose_of(path)]
    names = [name for tree in trees for _, name in declared_names(tree)]
    return {
        "files": len(files),
        "lines": sum(len(path.read_text().splitlines()) for path in files),
        "entries in the widest folder": max(Counter(path.parent for path in files).values()),
        "file names in several packages": sum(1 for count in stems.values() if count > 1),
        "docstrings that are fragments": sum(1 for word in first_words if word in FRAGMENTS or word[0].islower()),
        "archaic phrases": sum(len(re.findall(p, line, re.IGNORECASE)) for line in lines for p in NO_PHRASES),
        "declared names that are an everyday word": sum(1 for n in names if n.lower() in NO_NAMES and n[0] != "_"),
        "words of the longest page": max(len(re.sub(r"(?ms)^```.*?^```", "", p.read_text()).split()) for p in pages),
    }


def entered_files(python: str) -> dict[str, int]:
    """Return how many of the package's files a step, a fetch and a save enter on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, str(Path(__file__).with_name("one_step.py")), folder], check=True, timeout=300)
        entered = json.loads((Path(folder) / "entered.json").read_text())
    return {f"files entered by a {part}": len(names) for part, names in entered.items()}


def main() -> None:
    root, python = (Path(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 2 else (HERE, sys.executable)
    for name, count in {**static_counts(root), **entered_files(python)}.items():
        print(f"{count:>7,}  {name}")


if __name__ == "__main__":
    main()
