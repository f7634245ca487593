"""Above `init.limit` no process builds the whole model at the start, not even to plan its layout."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.launcher import LaunchRequest, start
from paceline.parallel.initialization.meta_model import tensor_bytes
from paceline.run_folder.run_folder import RunFolder
from tests.conftest import Shop
from tests.parallel.initialization.peak_memory_job import Block, Net

LIMIT = 1000
JOB = Path(__file__).parent / "peak_memory_job.py"
WHOLE = tensor_bytes(Net(64, 8))
MORE = 2 * tensor_bytes(Block(64)) + 1024
"""`fully_shard` gathers a block from a copy of its rows; else one tensor is drawn. And a batch."""
PARTS = {"fsdp": 2, "pp": 2, "tp": 2, "pp=2,dp_shard=2": 4, "dp_shard=2,tp=2": 4, "pp=2,tp=2": 4}
"""Of how many parts a process has one."""


def bound(layout: str) -> float:
    """The most bytes; gloo's own thread may let go of what a block was gathered from when the next one is."""
    sharded = "fsdp" in layout or "dp_shard" in layout
    return WHOLE / PARTS[layout] + MORE + (tensor_bytes(Block(64)) if sharded else 0)


def ranks_tell(folder: Path, *layouts: str, ranks: int, asks: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    payload = {"layouts": layouts, "limit": LIMIT, "answer": str(folder / "rank-"), "asks": asks}
    entry = "tests.parallel.initialization.peak_memory_job:run"
    outcome = start(LaunchRequest(ranks=ranks, run=RunFolder(folder / "run"), entry=entry, payload=payload))
    assert outcome.exit_code == 0, outcome.failure
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", ":".join([root, *(p for p in sys.path if p)]))


@pytest.mark.parametrize(
    "layouts",
    [("fsdp", "pp", "tp"), pytest.param(("pp=2,dp_shard=2", "dp_shard=2,tp=2", "pp=2,tp=2"), marks=pytest.mark.soak)],
    ids=["alone", "products"],
)
def test_nobody_has_the_whole_and_all_have_parts_of_the_same(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    told = ranks_tell(tmp_path, *layouts, ranks=PARTS[layouts[0]])
    for rank, found in enumerate(told):
        for layout, one in found.items():
            assert one["most"] <= bound(layout) < WHOLE, f"rank {rank}: {layout}, {one}, of {WHOLE}"
            assert "init.limit" in one["notes"][0] and len(one["notes"]) == 1
    assert len({one["digest"] for found in told for one in found.values()}) == 1


@pytest.mark.soak
def test_a_forward_that_asks_for_numbers_is_planned_one_tensor_at_a_time(tmp_path: Path) -> None:
    plain = ranks_tell(tmp_path, "pp", ranks=2)[0]["pp"]
    for found in ranks_tell(tmp_path, "pp", ranks=2, asks=("pp",)):
        assert found["pp"]["most"] <= WHOLE / 2 + MORE
        assert "needed the parameters' values" in found["pp"]["notes"][1]
        assert found["pp"]["digest"] == plain["digest"]


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["single", "ddp", *PARTS])
def test_through_the_command(tmp_path: Path, shop: Shop, layout: str) -> None:
    """Where a process holds all of it by the layout's nature, it has no more than one tensor beside it."""
    ranks = PARTS.get(layout, 1 if layout == "single" else 2)
    words = ("--init.limit", str(LIMIT), "--train.steps", "1", "--train.micro_batch_size", "1")
    answer = str(tmp_path / "answer")
    ended = shop.run(
        "train", str(JOB), "--layout", layout, "--ranks", str(ranks), *words, "--job.answer", answer, timeout=300
    )
    assert ended.code == 0, ended.text
    for rank in range(ranks):
        most = json.loads(Path(f"{answer}-{rank}.json").read_text())["most"]
        most_allowed = bound(layout) if layout in PARTS else WHOLE + 3 * MORE / 2
        assert 0 < most <= most_allowed, f"rank {rank}: {most} of {WHOLE}"
