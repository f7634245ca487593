"""Step times of this tree against those of an earlier commit, their runs interleaved on the same machine.

    python benchmarks/two_commits.py 65c1205                        # overhead.py, then fsdp, pp and tp of layouts.py
    python benchmarks/two_commits.py 65c1205 --pairs 20 --only ddp

The earlier commit is checked out beside this one, and each tree runs its own benchmark script, so that names which
have changed in between do not matter. A pair is one short run of each tree, in an order that alternates. In each run
the step of Paceline is divided by the step of a hand-written loop that takes turns with it, which cancels most of what
the machine does meanwhile. Printed: the mean over the pairs of the log ratio new/old, as a ratio, with its 95 %
interval by Student's t. Below 1.00 the new tree is faster.
"""

import argparse
import math
import re
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SMALL = ["--width", "128", "--hidden", "344", "--vocabulary", "512", "--length", "32", "--rounds", "60"]
RUNS = {
    "ddp": ["benchmarks/overhead.py", "--rounds", "100"],
    "one process": ["benchmarks/overhead.py", "--ranks", "1", "--width", "64", "--rounds", "800"],
    **{name: ["benchmarks/layouts.py", "--layouts", name, *SMALL] for name in ("fsdp", "pp", "tp")},
}
RATIO = re.compile(r"^ *paceline .*?ratio.*? (\d+\.\d+) \[", re.MULTILINE)
# Two-sided 95 % quantiles of Student's t by degrees of freedom; in between, the next smaller one is used.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 9: 2.26, 11: 2.20, 14: 2.14, 19: 2.09}


@dataclass(frozen=True)
class Tree:
    """A checkout, and a Python that imports the package from it and everything else from this environment."""

    folder: Path
    python: Path

    @staticmethod
    def open_(folder: Path, environment: Path) -> "Tree":
        """Build the environment; its paths stand in a file, since the ranks' processes drop PYTHONPATH."""
        venv.create(environment, with_pip=False, symlinks=True)
        paths = [str(folder / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
        for site in environment.glob("lib/python*/site-packages"):
            (site / "two_commits.pth").write_text("\n".join(paths) + "\n")
        return Tree(folder, environment / "bin" / "python")

    def run_ratio(self, command: list[str]) -> float:
        """Run a benchmark and return the time of Paceline's step divided by that of the hand-written loop."""
        done = subprocess.run(
            [str(self.python), *command], cwd=self.folder, capture_output=True, text=True, timeout=900, check=False
        )
        found = RATIO.search(done.stdout)
        if found is None:
            sys.exit(f"{self.folder}: {' '.join(command)} printed no ratio\n{done.stdout}{done.stderr}")
        return float(found[1])


@contextmanager
def two_trees(commit: str, folder: Path) -> Iterator[tuple[Tree, Tree]]:
    """Check out the earlier commit in `folder` while the block runs; yield it and this tree."""
    old = folder / "old"
    git = ["git", "-C", str(HERE), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(old), commit], check=True)
    try:
        yield Tree.open_(old, folder / "old-venv"), Tree.open_(HERE, folder / "new-venv")
    finally:
        subprocess.run([*git, "remove", "--force", str(old)], check=True)


def interval(logs: list[float]) -> tuple[float, float, float]:
    """Return the mean of log ratios as a ratio, and its 95 % interval."""
    middle = statistics.fmean(logs)
    quantile = STUDENT[max(n for n in STUDENT if n < len(logs))]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def compare_trees(old: Tree, new: Tree, *, names: list[str], pairs: int) -> None:
    """Print a line for each benchmark: both trees' ratios to the hand-written loop, and the ratio between them."""
    for name in names:
        ratios: dict[Tree, list[float]] = {old: [], new: []}
        for pair in range(pairs):
            for tree in (old, new) if pair % 2 == 0 else (new, old):
                ratios[tree].append(tree.run_ratio(RUNS[name]))
        logs = [math.log(after / before) for before, after in zip(ratios[old], ratios[new], strict=True)]
        middle, low, high = interval(logs)
        print(
            f"{name:<12} {pairs} pairs   to the hand-written loop: old {statistics.median(ratios[old]):.4f}, "
            f"new {statistics.median(ratios[new]):.4f}   new/old {middle:.4f} [{low:.4f}, {high:.4f}]",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    asked = parser.parse_args()
    if asked.pairs < 2:
        sys.exit("--pairs must be at least 2: an interval needs two values")
    with tempfile.TemporaryDirectory() as folder, two_trees(asked.commit, Path(folder)) as trees:
        compare_trees(*trees, names=asked.only, pairs=asked.pairs)


if __name__ == "__main__":
    main()
