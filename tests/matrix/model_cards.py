"""Model cards: a YAML file per model family with the verdict of every layout, and where and when it was measured.

Each card names the commit, so the files of that commit must be those that ran: `check_committed` refuses others.
"""

import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from tests.matrix.matrix_page import ROOT
from tests.zoo import JOBS

VERDICTS = ("bitwise", "rounding", "refused", "different", "failed", "hung")


def check_committed() -> None:
    """Raise SystemExit if a file of `src` or `tests` is not as in the last commit."""
    changed = _git("status", "--porcelain", "--", "src", "tests")
    if changed:
        raise SystemExit(
            f"a card names a commit, and these files are not committed:\n{changed}\nCommit, and run again."
        )


def write(results: Sequence[dict[str, Any]], *, folder: Path) -> list[Path]:
    """Write the card of each family in `results`, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    families = dict.fromkeys(str(one["model"]) for one in results)
    paths = []
    for family in families:
        path = folder / f"{family}.yaml"
        path.write_text(yaml.safe_dump(_card(family, results), sort_keys=False, allow_unicode=True, width=120))
        paths.append(path)
    return paths


def _card(family: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = [_row(one) for one in results if one["model"] == family]
    counts = Counter(row["verdict"] for row in rows)
    with torch.device("meta"):
        model = JOBS[family]().model()
    return {
        "family": family,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "job": f"tests/zoo.py:{family}",
        "commit": _git("rev-parse", "HEAD"),
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python -m tests.matrix --only {family} --cards docs/cards",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
            "transformers": transformers.__version__,
        },
        "machine": {"device": "cpu", "backend": "gloo", "kernels": torch.backends.cpu.get_cpu_capability()},
        "verdicts": {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]},
        "layouts": rows,
    }


def _row(one: dict[str, Any]) -> dict[str, Any]:
    """Return one layout's entry: its verdict, what the verdict rests on, and the command that repeats it."""
    micro = f" --train.micro_batch_size {one['micro']}" if one["micro"] else ""
    row = {"layout": one["asked"], "ranks": one["ranks"], "verdict": one["state"]}
    if one["state"] in VERDICTS[:2]:
        row["steps"] = one["steps"]
        row["precision"] = "fp32" if "fp32" in one["parts"] else "float64"
        part = one["parts"][row["precision"]]
        row |= {"compared": part["compared"], "difference": part["max_difference"], "noise_floor": part["noise_floor"]}
    else:
        row["reason"] = one.get("why") or str(one.get("first_difference"))
    return row | {"verify": f"paceline verify {_job(one)} --layout {one['asked']} --ranks {one['ranks']}{micro}"}


def _job(one: dict[str, Any]) -> str:
    return f"tests/zoo.py:{one['model']}"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
