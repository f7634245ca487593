"""`python -m tests.matrix`: run it, print it, write it."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paceline.launch.launch_environment import choose_exact_kernels

choose_exact_kernels()  # before torch, for exact mode

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.matrix import matrix_cases, matrix_page, model_cards, rank_pool  # noqa: E402


def main() -> int:
    asked = _read(sys.argv[1:])
    if asked.cards:
        model_cards.check_committed()
    chosen = [case for case in _chosen(asked) if not asked.only or case.model in asked.only]
    chosen = [case for case in chosen if not asked.layouts or case.layout in asked.layouts]
    found = _read_back(asked.read) or _run(chosen, asked)
    if asked.write:
        versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}."
        matrix_page.write(
            found, path=Path(asked.write), command="python -m tests.matrix --write docs/matrix.md", versions=versions
        )
    if asked.cards:
        model_cards.write(found, folder=Path(asked.cards))
    for why in matrix_page.unlisted(found):
        print(f"not in docs/refusals.md: {why}")
    counts: dict[str, int] = {}
    for one in found:
        counts[one["state"]] = counts.get(one["state"], 0) + 1
    print("  ".join(f"{state}: {number}" for state, number in sorted(counts.items())))
    wrong = [one for one in found if one["state"] not in ("bitwise", "rounding", "refused")]
    return 1 if wrong or matrix_page.unlisted(found) else 0


def _run(chosen: list[matrix_cases.Case], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """With `--json` each answer is on disk as soon as it is there."""
    found: list[dict[str, Any]] = []

    def tell(answer: dict[str, Any]) -> None:
        _tell(answer)
        found.append(answer)
        if asked.json:
            Path(asked.json).write_text(json.dumps(found, indent=1))

    return rank_pool.run_all(chosen, log=Path(asked.log), seconds=asked.seconds, tell=tell)


def _read_back(files: list[str]) -> list[dict[str, Any]]:
    """What earlier runs left; of a case that was run twice the later answer."""
    found = {}
    for one in (one for file in files for one in json.loads(Path(file).read_text())):
        found[one["model"], one["asked"], one["ranks"]] = one
    return list(found.values())


def _chosen(asked: argparse.Namespace) -> list[matrix_cases.Case]:
    more: dict[str, Any] = {"steps": asked.steps}
    if asked.checks:
        more["checks"] = tuple(asked.checks)
    if asked.micro:
        more["micro"] = asked.micro
    if asked.params:
        more["params"] = asked.params
    settings = {"train.exact": True} if asked.exact else {}
    settings |= {"train.tensor_shards": asked.tensor_shards} if asked.tensor_shards else {}
    settings |= {"init.limit": asked.limit} if asked.limit else {}
    settings |= {"train.sequence_shards": asked.sequence_shards} if asked.sequence_shards else {}
    if settings:
        more["settings"] = settings
    if asked.case:
        named = [word.split(":") for word in asked.case]
        found = [matrix_cases.make(model, layout, int(ranks), **more) for model, layout, ranks in named]
        return sorted(found, key=lambda case: case.processes)
    if asked.try_layouts:
        models = asked.only or matrix_cases.MODELS
        return [
            matrix_cases.make(m, layout, n, **more) for n in asked.ranks for layout in asked.try_layouts for m in models
        ]
    return matrix_cases.whole(asked.ranks, **more)


def _read(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--layouts", nargs="+", help="of the list")
    parser.add_argument("--try", dest="try_layouts", nargs="+", help="any, also what the list has not")
    parser.add_argument("--case", nargs="+", help="these alone: llama:fsdp:2")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro", type=int)
    parser.add_argument("--checks", nargs="+")
    parser.add_argument("--params", type=json.loads, help='of the model, as JSON: {"depth": 8}')
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--tensor-shards", type=int, help="train.tensor_shards: exact tp")
    parser.add_argument("--sequence-shards", type=int, help="train.sequence_shards: exact cp")
    parser.add_argument("--limit", type=int, help="init.limit: a model above it is whole nowhere at the start")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", help="write the answers there")
    parser.add_argument("--read", nargs="+", default=[], help="run nothing: the answers of earlier runs")
    parser.add_argument("--write", help="write the page there")
    parser.add_argument("--cards", help="write the cards of the families there")
    parser.add_argument("--log", default="/tmp/matrix-log")
    return parser.parse_args(words)


def _tell(answer: dict[str, Any]) -> None:
    where = answer.get("first_difference")
    why = answer.get("why", "") if where is None else f"{where['parameter']}: {where['cause']}"
    print(f"{answer['state']:<9} {answer['model']:<8} {answer['asked']:<42} ×{answer['ranks']}"
          f" {answer['seconds']:>6.1f} s  {why}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
