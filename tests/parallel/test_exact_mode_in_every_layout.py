"""One digest for the initial weights in every layout, and in exact mode for the weights after some steps.

Exact mode: single, ddp, zero1, zero2, fsdp, hsdp, pp under each schedule, and their mixtures, on 1 to 8 ranks; and tp
and cp with a fixed number of shards.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.matrix.matrix_cases import MODELS, SCHEDULES, SINGLES, is_single
from tests.matrix.test_matrix import one_digest, run, wrong

ABOVE = (
    "single:1",
    "ddp:2",
    "fsdp:2",
    "pp,schedule=zbv:2",
    "tp:2",
    "cp:2",
    "ep:2",
    "dp_shard=2,ep=2:2",
    "pp=2,tp=2:4",
)
EXACT = ("text", "llama")
SHORT = (
    "single:1", "ddp:2", "fsdp:2", "pp,schedule=zbv:2", "pp=2,dp_shard=2:4",
)  # fmt: skip
TIED = ("single:1", "pp,schedule=zbv:2", "pp=2,dp_shard=2:4")
TIED_LONG = (
    *("single:1", "threads:2", "ddp:2", "zero1:2", "zero2:2", "pp:3"),
    *(f"pp,schedule={schedule}:2" for schedule in SCHEDULES),
    *("pp=2,dp_replicate=2:4", "pp=2,dp_shard=2,zero=1:4", "pp=2,dp_shard=2,zero=2,schedule=zb_h1:4"),
)  # fmt: skip
FULLY = ("fsdp:2", "hsdp:4", "pp=2,dp_shard=2:4", "pp=2,dp_shard=2,schedule=zbv:4")
LONG = (
    *("single:1", "threads:2", "ddp:2", "ddp:3", "ddp:8", "zero1:2", "zero1:4", "zero2:2", "zero2:3", "fsdp:2"),
    *("fsdp:3", "fsdp:8", "fsdp,remat=full:4", "hsdp:4", "hsdp,zero=1:4", "hsdp,zero=2:4", "pp:3", "pp:4"),
    *(f"pp,schedule={schedule}:2" for schedule in SCHEDULES),
    *("pp,schedule=gpipe:4", "pp,schedule=zb_h1:4", "pp=2,dp_replicate=2:4", "pp=2,dp_shard=2,zero=1:4"),
    *("pp=2,dp_shard=2,zero=2,schedule=zb_h1:4", "pp=2,dp_shard=2:4", "pp=2,dp_shard=2,schedule=zbv:4"),
    *("pp=2,dp_shard=2,schedule=interleaved,remat=full:4", "pp=2,dp_replicate=2,remat=full:4"),
    *("pp=2,dp_replicate=2,dp_shard=2:8", "pp=4,dp_shard=2,zero=1:8", "pp=2,dp_shard=4,schedule=breadth_first:8"),
    *("hsdp,dp_shard=2:8", "pp=2,dp_replicate=2,dp_shard=2,zero=2:8"),
    *("zero1:3", "ddp:5", "zero1:6", "hsdp,dp_shard=3:6", "pp=3,dp_shard=2:6", "pp=3,dp_replicate=2,schedule=1f1b:6"),
    *("fsdp:7", "zero1:8", "zero2:8", "hsdp:8", "hsdp,zero=2:8", "pp=4,dp_replicate=2,schedule=gpipe:8"),
    *("pp=4,dp_shard=2,zero=2,schedule=naive:8",),
)
SHARDED = ("text", "llama", "qwen3_moe")
TENSOR_SHORT = ("llama:single:1", "llama:tp:2", "qwen3_moe:single:1", "qwen3_moe:tp:2")
TENSOR_LONG = (
    *("single:1", "ddp:2", "fsdp:2", "tp:2", "tp,remat=full:2", "tp:4", "dp_replicate=2,tp=2:4", "dp_shard=2,tp=2:4"),
    *("dp_shard=2,tp=2,zero=1:4", "pp=2,tp=2:4", "pp=2,tp=2,schedule=zbv:4", "pp=2,dp_shard=2,tp=2:8"),
)
SEQUENCE_SHORT = ("llama:single:1", "llama:cp:2")
SEQUENCE_LONG = (
    *("single:1", "ddp:2", "fsdp:2", "cp:2", "cp,remat=full:2", "cp:4", "dp_replicate=2,cp=2:4", "dp_shard=2,cp=2:4"),
    *("dp_shard=2,cp=2,zero=1:4", "pp=2,cp=2:4", "pp=2,cp=2,schedule=zb_h1:4", "pp=2,dp_shard=2,cp=2:8"),
)
START = (
    *("zero2:3", "pp=2,dp_shard=2:4", "dp_shard=2,tp=2:4", "pp=2,tp=2,schedule=zbv:4", "dp_shard=2,cp=2:4"),
    *("dp_replicate=2,dp_shard=2,ep=2:4", "fsdp:8", "pp=2,dp_replicate=2,dp_shard=2:8"),
)


def exact(folder: Path, words: Sequence[str], seconds: float, *more: str) -> list[dict[str, Any]]:
    """Four steps, the third of one sample and the fourth in the next epoch, one sample a microbatch."""
    return run(
        folder, "--case", *words, "--exact", "--micro", "1", "--steps", "4", "--checks", "start", "final", *more,
        seconds=seconds,
    )  # fmt: skip


def test_exact_mode_ends_in_one_digest(tmp_path: Path) -> None:
    words = [f"{model}:{layout}" for layout in SHORT for model in EXACT]
    words += [f"gpt2:{layout}" for layout in TIED]
    answers = exact(tmp_path, words, 400)
    assert len(answers) == len(words)
    for what in ("start", "final"):
        one_digest(answers, what, models=(*EXACT, "gpt2"))
    assert all(one["start"] != one["final"] for one in answers)


@pytest.mark.soak
def test_exact_mode_ends_in_one_digest_everywhere(tmp_path: Path) -> None:
    answers = exact(tmp_path, [f"{model}:{layout}" for layout in LONG for model in EXACT], 3600)
    assert len(answers) == len(LONG) * len(EXACT)
    for what in ("start", "final"):
        one_digest(answers, what, models=EXACT)
    assert all(one["start"] != one["final"] for one in answers)


def test_the_long_list_has_every_size_kind_and_ten_mixtures() -> None:
    rows = [layout.split(":") for layout in LONG]
    assert {int(ranks) for _, ranks in rows} == set(range(1, 9))
    assert {word for word, _ in rows} >= {"single", "ddp", "zero1", "zero2", "fsdp", "hsdp"}
    assert {word for word, _ in rows} >= {f"pp,schedule={schedule}" for schedule in SCHEDULES}
    assert len({word for word, _ in rows if word.startswith("pp=") and "dp_" in word}) >= 10


@pytest.mark.soak
def test_tied_weights_end_in_one_digest(tmp_path: Path) -> None:
    models = ("gpt2", "bert", "nano", "t5")
    words = [f"{model}:{layout}" for layout in (*TIED_LONG, *FULLY) for model in models]
    answers = exact(tmp_path, words, 3600)
    for what in ("start", "final"):
        one_digest(answers, what, models=models)


@pytest.mark.parametrize(
    ("words", "option"), [(TENSOR_SHORT, "--tensor-shards"), (SEQUENCE_SHORT, "--sequence-shards")]
)
def test_shards_end_in_one_digest_on_one_rank_and_on_two(tmp_path: Path, words: Sequence[str], option: str) -> None:
    answers = exact(tmp_path, words, 400, option, "4")
    assert len(answers) == len(words)
    one_digest(answers, "final", models=tuple(dict.fromkeys(word.partition(":")[0] for word in words)))
    assert all(one["start"] != one["final"] for one in answers)


@pytest.mark.soak
@pytest.mark.parametrize("params", ["{}", '{"dropout": 0.2}'])
@pytest.mark.parametrize(
    ("layouts", "option"), [(TENSOR_LONG, "--tensor-shards"), (SEQUENCE_LONG, "--sequence-shards")]
)
def test_shards_end_in_one_digest_everywhere(tmp_path: Path, layouts: Sequence[str], option: str, params: str) -> None:
    models = SHARDED if params == "{}" else ("text",)
    words = [f"{model}:{layout}" for layout in layouts for model in models]
    answers = exact(tmp_path, words, 3600, option, "4", "--params", params)
    assert len(answers) == len(words)
    one_digest(answers, "final", models=models)
    assert all(one["start"] != one["final"] for one in answers)


@pytest.mark.soak
def test_tied_and_fused_weights_in_shards_end_in_one_digest(tmp_path: Path) -> None:
    models = ("gpt2", "bert", "t5", "vit", "nano", "mixtral")
    answers = exact(
        tmp_path,
        [f"{m}:{layout}" for layout in ("single:1", "tp:2", "tp:4") for m in models],
        1800,
        "--tensor-shards",
        "4",
    )
    one_digest(answers, "final", models=models)


@pytest.mark.soak
def test_every_layout_starts_with_the_weights_of_one_plain_build(tmp_path: Path) -> None:
    """The matrix of `make soak` says so for its mixtures too."""
    rows = [*(f"{layout}:{ranks}" for ranks, row in SINGLES.items() for layout in row), *START]
    answers = run(
        tmp_path, "--case", *(f"{m}:{row}" for row in rows for m in MODELS), "--checks", "start", seconds=3600
    )
    assert len(answers) == len(MODELS) * len(rows)
    assert not wrong(answers)
    built = [one for one in answers if one["state"] != "refused"]
    for model in MODELS:
        assert sum(one["model"] == model and is_single(one["asked"]) for one in built) >= 6, model
    one_digest(built, "start", models=MODELS)


@pytest.mark.soak
def test_every_layout_starts_alike_above_the_limit(tmp_path: Path) -> None:
    """Where no process has the whole: parts of one digest, which is not that of the plain build; and one training."""
    rows = [(model, layout) for layout in (*ABOVE, *START) for model in MODELS]
    words = [f"{m}:{row}" for m, row in rows if (m, row) != ("nano", "dp_shard=2,cp=2:4")]  # is not tried, and told so
    answers = run(
        tmp_path, "--case", *words, "--limit", "1000", "--checks", "start", "float64", "--seconds", "240", seconds=7200
    )
    assert not wrong(answers)
    built = [one for one in answers if one["state"] != "refused"]
    assert len(built) > len(MODELS) * 6
    one_digest(built, "start", models=MODELS)
    plain = run(tmp_path, "--case", *(f"{model}:single:1" for model in MODELS), "--checks", "start", seconds=900)
    assert not {one["start"] for one in plain} & {one["start"] for one in built}
