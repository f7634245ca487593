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
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
RUNS = {
    "ddp": ["benchmarks/overhead.py", "--rounds", "200"],
    "one process": ["benchmarks/overhead.py", "--ranks", "1", "--width", "64", "--rounds", "800"],
    "fsdp": ["benchmarks/layouts.py", "--layouts", "fsdp", "--rounds", "60"],
    "pp": ["benchmarks/layouts.py", "--layouts", "pp", "--rounds", "60"],
    "tp": ["benchmarks/layouts.py", "--layouts", "tp", "--rounds", "60"],
}
RATIO = re.compile(r"^ *paceline .*?ratio.*? (\d+\.\d+) \[", re.MULTILINE)
# Two-sided 95 % quantiles of Student's t by degrees of freedom; in between, the next smaller one is used.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 9: 2.26, 11: 2.20, 14: 2.14, 19: 2.09}


def run_ratio(tree: Path, command: list[str]) -> float:
    """Run a benchmark of `tree` and return the time of Paceline's step divided by that of the hand-written loop."""
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree / 'benchmarks'}"}
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    found = RATIO.search(done.stdout)
    if found is None:
        sys.exit(f"{tree}: {' '.join(command)} printed no ratio\n{done.stdout}{done.stderr}")
    return float(found[1])


def interval(logs: list[float]) -> tuple[float, float, float]:
    """Return the mean of log ratios as a ratio, and its 95 % interval."""
    middle = statistics.fmean(logs)
    quantile = STUDENT[max(n for n in STUDENT if n < len(logs))]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def compare_trees(old: Path, *, names: list[str], pairs: int) -> None:
    """Print a line for each benchmark: both trees' ratios to the hand-written loop, and the ratio between them."""
    for name in names:
        ratios: dict[Path, list[float]] = {old: [], HERE: []}
        for pair in range(pairs):
            for tree in (old, HERE) if pair % 2 == 0 else (HERE, old):
                ratios[tree].append(run_ratio(tree, RUNS[name]))
        logs = [math.log(new / before) for before, new in zip(ratios[old], ratios[HERE], strict=True)]
        middle, low, high = interval(logs)
        before, new = (statistics.median(ratios[tree]) for tree in (old, HERE))
        print(
            f"{name:<12} {pairs} pairs   to the loop by hand: old {before:.4f}, new {new:.4f}   "
            f"new/old {middle:.4f} [{low:.4f}, {high:.4f}]",
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
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder, "old")
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), asked.commit], check=True)
        try:
            compare_trees(old, names=asked.only, pairs=asked.pairs)
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)


if __name__ == "__main__":
    main()
