"""Results as a page: docs/matrix.md, with a summary of each kind of layout at the top."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.matrix.matrix_cases import MODELS, SINGLES, is_single

ROOT = Path(__file__).resolve().parents[2]
REFUSALS = ROOT / "docs" / "refusals.md"
_SAME = {"bitwise": "bitwise", "rounding": "rounding"}
_HEAD = """# The matrix: models × layouts

On this page you can look up which models train under which [layouts](layouts.md), and how closely each training equals that in one process.

Each cell is one job of `tests/zoo.py` under one layout, run in real processes over gloo on CPU. Each step starts from equal
weights and is compared with one process: the gradients of every parameter, the loss, the buffers, and then the weights
after the update. Each run has two steps. The second step is the short last batch of an epoch, with one sample.

The precision is {dtypes}.

- **bitwise**: all bits are equal.
- **rounding**: every difference is below the noise floor of its tensor. To measure the floor, the training in one
  process is repeated: once with each weight changed by one unit in the last place, and once with the microbatches added
  in reverse order. Which cells are bitwise depends on the processor too, because its kernels choose the order of
  additions.
- a number: refused before the first step. The message is under this number in the list at the end of the page, and the reason is in
  [refusals](refusals.md).
- empty: not run for this page.

The models from `transformers` are unmodified and built from their configs (four blocks, width 32, four heads). `text`,
`digits` and `nano` are plain `nn.Module`s. Versions: {versions}

`{command}` writes this page. `make soak` runs all of it.

"""
_SUMMARY = """Each row of this table combines all rows for one kind of layout in the table of single layouts below: those with any
number of ranks and, for `pp`, any schedule. A cell shows the weakest of the combined results: *rounding* if one of
them is rounding, *bitwise* if all are bitwise, *refused* if all are refused. The last row of this table counts the
rows of the table of mixtures, which combine several axes or options: *n of m* means that n of m mixtures train and
equal one process, and the others are refused.
"""


def patterns() -> list[str]:
    """Return the message patterns of docs/refusals.md: the code at the start of each entry, `…` for any text."""
    return re.findall(r"^- `(.+?)`", REFUSALS.read_text(), flags=re.MULTILINE)


def stands(why: str, known: Iterable[str]) -> str | None:
    """The pattern that a refusal is under."""
    for pattern in known:
        if re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), why, flags=re.DOTALL):
            return pattern
    return None


def unlisted(results: Sequence[dict[str, Any]]) -> list[str]:
    """Refusals that the page does not have."""
    known = patterns()
    return sorted({one["why"] for one in results if one["state"] == "refused" and stands(one["why"], known) is None})


def matrix(results: Sequence[dict[str, Any]], *, command: str, versions: str) -> str:
    """The whole page."""
    models = [model for model in MODELS if any(one["model"] == model for one in results)]
    reasons: dict[str, int] = {}
    single = [row for row in _rows(results) if is_single(row[0])]
    mixed = [row for row in _rows(results) if not is_single(row[0])]
    parts = [
        f"## Summary\n\n{_SUMMARY}",
        short(results),
        "## Single layouts\n",
        _table(single, results, models, reasons),
        "\n## Mixtures\n",
        _table(mixed, results, models, reasons),
        "\n## Refused\n",
        *(f"{number}. {reason}" for reason, number in reasons.items()),
    ]
    return _HEAD.format(dtypes=_dtypes(results), versions=versions, command=command) + "\n".join(parts) + "\n"


def short(results: Sequence[dict[str, Any]]) -> str:
    """Return the summary table: each kind of layout over all models."""
    models = [model for model in MODELS if any(one["model"] == model for one in results)]
    lines = [f"| layout | {' | '.join(models)} |", f"| --- | {' | '.join('---' for _ in models)} |"]
    words = list(dict.fromkeys(layout.partition(",")[0] for row in SINGLES.values() for layout in row))
    for word in words:
        rows = [one for one in results if is_single(one["asked"]) and one["asked"].partition(",")[0] == word]
        lines.append(f"| `{word}` | {' | '.join(_worst(rows, model) for model in models)} |")
    mixed = [one for one in results if not is_single(one["asked"])]
    lines.append(f"| mixtures | {' | '.join(_counted(mixed, model) for model in models)} |")
    return "\n".join(lines) + "\n"


def write(results: Sequence[dict[str, Any]], *, path: Path, command: str, versions: str) -> None:
    """Write the page."""
    path.write_text(matrix(results, command=command, versions=versions))


def _rows(results: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    found = dict.fromkeys((str(one["asked"]), int(one["ranks"])) for one in results)
    return sorted(found, key=lambda row: row[1])


def _table(
    rows: Sequence[tuple[str, int]],
    results: Sequence[dict[str, Any]],
    models: Sequence[str],
    reasons: dict[str, int],
) -> str:
    by_place = {(one["asked"], one["ranks"], one["model"]): one for one in results}
    lines = [f"| layout | ranks | {' | '.join(models)} |", f"| --- | --- | {' | '.join('---' for _ in models)} |"]
    for layout, ranks in rows:
        cells = [_cell(by_place.get((layout, ranks, model)), reasons) for model in models]
        lines.append(f"| `{layout}` | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(one: dict[str, Any] | None, reasons: dict[str, int]) -> str:
    if one is None:
        return ""
    if one["state"] in _SAME:
        return _SAME[one["state"]]
    if one["state"] == "refused":
        why = stands(one["why"], patterns()) or one["why"]
        return f"({reasons.setdefault(why, len(reasons) + 1)})"
    return f"**{one['state']}**"


def _worst(rows: Sequence[dict[str, Any]], model: str) -> str:
    states = {one["state"] for one in rows if one["model"] == model}
    for state in ("hung", "failed", "different"):
        if state in states:
            return f"**{state}**"
    if states == {"refused"}:
        return "refused"
    return next((state for state in ("rounding", "bitwise") if state in states), "")


def _counted(rows: Sequence[dict[str, Any]], model: str) -> str:
    mine = [one for one in rows if one["model"] == model]
    equal = sum(one["state"] in _SAME for one in mine)
    return f"{equal} of {len(mine)}" if mine else ""


def _dtypes(results: Sequence[dict[str, Any]]) -> str:
    other = sorted({str(one["model"]) for one in results if "fp32" in one.get("parts", {})})
    return "float64" + (f" (fp32 for {', '.join(other)}, whose own kernels have no float64)" if other else "")
