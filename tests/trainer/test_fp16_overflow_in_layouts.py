"""fp16 overflows in the first steps and evaluations that draw give one process's results in each layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_resume_in_another_layout import played, weights

HALF = {"train.precision": "fp16", "train.steps": 8}
EVAL = {"train.steps": 1, "eval.batch_size": 2}
BITWISE = ("fsdp", "hsdp", "zero2", "pp", "pp=2,dp_shard=2", "dp=2,pp=2")
HALVES = {"mlp": (*BITWISE, "tp", "pp=2,tp=2"), "text": ("cp", "pp=2,cp=2", "dp_shard=2,cp=2"),
          "mixtral": ("dp=2,ep=2", "dp_shard=4,ep=2", "dp=2,ep=2,pp=2")}  # fmt: skip
EVALS = ("ddp", "fsdp", "zero1", "pp", "hsdp", "pp=2,dp_shard=2")
SOME = {("mlp", "fsdp"), ("sampled", "pp")}
ALL = {(job, layout) for job, layouts in HALVES.items() for layout in layouts}
ALL |= {(job, layout) for job in ("sampled", "alone") for layout in EVALS}


def answers(folder: Path, pairs: set[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Each job in one process and in these layouts; what came of it."""
    cases: dict[int, list[list[Any]]] = {1: [], 2: [], 4: []}
    for job, layout in sorted({(job, "single") for job, _ in pairs} | pairs):
        ranks = 1 if layout == "single" else 4 if layout == "hsdp" or "," in layout.removesuffix(",ep=2") else 2
        ranks = 4 if layout in ("dp_shard=4,ep=2", "dp=2,ep=2,pp=2") else ranks
        how = HALF if job in HALVES else EVAL
        cases[ranks].append([f"{job}-{layout}", layout, "", f"tests/trainer/fp16_overflow_jobs.py:{job}", how])
    for ranks, some in cases.items():
        if some:
            played(folder, ranks, some)
    return {
        (job, layout): json.loads((folder / f"{job}-{layout}" / "answer.json").read_text())
        for job, layout in {(job, "single") for job, _ in pairs} | pairs
    }


def check(folder: Path, pairs: set[tuple[str, str]]) -> None:
    found = answers(folder, pairs)
    for job, layout in sorted(pairs):
        one, mine = found[job, "single"], found[job, layout]
        assert mine["metrics"] == one["metrics"], (job, layout)
        if job not in HALVES:
            assert one["metrics"]
            continue
        assert 1.0 < one["scale"] == mine["scale"] < 65536.0, (job, layout, "as many steps are skipped")
        right, theirs = (weights(folder / f"{job}-{each}" / "consolidated") for each in ("single", layout))
        assert mine["losses"] == pytest.approx(one["losses"], rel=2e-3), (job, layout)  # two units of float16
        if layout in BITWISE:
            assert (theirs == right).all(), (job, layout)
        else:
            assert (theirs - right).norm() < 1e-4 * right.norm(), (job, layout)


def test_fp16_and_evaluations_that_draw_are_one_process_s(tmp_path: Path) -> None:
    check(tmp_path, SOME)


@pytest.mark.soak
def test_fp16_and_evaluations_that_draw_are_one_process_s_in_more_layouts(tmp_path: Path) -> None:
    check(tmp_path, ALL - SOME)
