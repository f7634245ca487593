"""A last batch of one sample on 8 ranks, under every layout alone and in mixtures: most ranks have no data.

The matrix's second step is such a batch (17 samples in eights), beside one process. Each axis gets all eight ranks too:
there are eight blocks, heads and experts, and sixteen blocks for the schedules that have two stages a rank.
"""

from pathlib import Path

import pytest

from tests.matrix.matrix_cases import SINGLES
from tests.matrix.matrix_worker import SAMPLES
from tests.matrix.test_matrix import run
from tests.zoo import BATCH

TEXT = (
    *("threads", "ddp", "zero1", "zero2", "fsdp", "tp", "cp", "hsdp"),
    *("pp,schedule=naive", "pp,schedule=gpipe", "pp,schedule=1f1b", "pp,schedule=zb_h1"),
    *("tp,sequence=true", "fsdp,remat=full", "hsdp,dp_shard=2", "hsdp,zero=1", "hsdp,dp_shard=2,zero=2"),
    *("dp_replicate=2,tp=4", "dp_replicate=4,tp=2", "dp_shard=4,tp=2", "dp_shard=2,tp=4,zero=1", "pp=2,tp=4"),
    *("dp_replicate=4,cp=2", "dp_shard=4,cp=2", "dp_shard=2,cp=4,zero=1", "pp=2,cp=4"),
    *("cp=4,tp=2", "pp=2,cp=2,tp=2", "dp_shard=2,tp=4,sequence=true"),
    *("pp=2,dp_replicate=4", "pp=2,dp_shard=4", "pp=2,dp_shard=4,zero=1", "pp=4,dp_replicate=2,schedule=zbv"),
    *("pp=4,dp_shard=2,zero=2,schedule=zb_h1", "pp=2,dp_replicate=2,dp_shard=2,schedule=interleaved"),
)
DEEP = ("pp,schedule=interleaved", "pp,schedule=breadth_first", "pp,schedule=zbv")
EXPERTS = (
    *("ep", "dp_shard=8,ep=8", "dp_shard=8,ep=8,zero=1", "dp_replicate=8,ep=4", "dp_shard=8,ep=2"),
    *("dp_replicate=2,dp_shard=4,ep=4", "pp=2,dp_replicate=4,ep=4", "pp=2,dp_shard=4,ep=2"),
    *("dp_replicate=4,ep=4,tp=2", "dp_shard=4,ep=2,cp=2"),
)


def test_every_single_layout_is_in_the_list() -> None:
    single = {layout for row in SINGLES.values() for layout in row} - {"single"}
    assert single <= {*TEXT, *DEEP, *EXPERTS}
    assert SAMPLES % BATCH == 1


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "params", "layouts"),
    [
        ("text", '{"depth": 8, "heads": 8}', TEXT),
        ("text", '{"depth": 16}', DEEP),
        ("mixtral", '{"experts": 8}', EXPERTS),
    ],
    ids=["text", "deep", "mixtral"],
)
def test_a_last_batch_of_one_sample_on_eight_ranks(
    tmp_path: Path, model: str, params: str, layouts: tuple[str, ...]
) -> None:
    words = [f"{model}:{layout}:8" for layout in layouts]
    answers = run(tmp_path, "--case", *words, "--params", params, "--seconds", "240", seconds=3600)
    assert len(answers) == len(layouts)
    unequal = {one["asked"]: one.get("why") or one for one in answers if one["state"] not in ("bitwise", "rounding")}
    assert not unequal
