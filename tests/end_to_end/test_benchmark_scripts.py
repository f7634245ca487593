"""Each benchmark runs with tiny sizes and what it compares is equal; the timings are not checked."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Shop

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.soak
TINY = "--rounds 2 --width 32 --hidden 48 --heads 4 --blocks 2 --vocabulary 64 --length 8 --batch 8"


def run(command: str) -> str:
    name, *words = command.split()
    environ = {**Shop.environ({"OMP_NUM_THREADS": "1"}), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *words],
        env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_the_search_finds_what_looking_at_every_layout_finds() -> None:
    said = run("search.py --cases small 8B")
    assert said.count(": equal") == 2 and "DIFFERENT" not in said, said


@pytest.mark.parametrize("layout", ["fsdp", "tp", "pp"])
def test_layouts_end_in_the_weights_of_the_loops_by_hand(layout: str) -> None:
    said = run(f"layouts.py --layouts {layout} {TINY}")
    apart = [float(found) for found in re.findall(r"weights apart (\S+)", said)]
    assert len(apart) >= 3 and "paceline" in said, said
    assert max(apart) < 1e-3, said  # of the way from the start: AdamW enlarges rounding where a gradient is tiny


@pytest.mark.parametrize("ranks", [2, 4])
def test_bubbles_are_measured_and_drawn(ranks: int, tmp_path: Path) -> None:
    picture = tmp_path / "both.svg"
    said = run(f"bubble.py --rounds 1 --ranks {ranks} --wait 0.002 --picture {picture}")
    assert said.count(" us\n") == 8 and "gradients those of one process" in said, said
    assert "zbv, measured" in picture.read_text()


def test_schedules_give_what_torch_gives() -> None:
    said = run("schedule_overhead.py --rounds 2 --micro 4 --width 16 --batch 4")
    rows = [json.loads(line) for line in said.splitlines()]
    assert len(rows) == 6
    apart = {row["schedule"]: row["losses_and_gradients_apart"] for row in rows}
    assert apart.pop("breadth_first") < 1e-6  # torch's adds up a stage's microbatches in another order
    assert set(apart.values()) == {0.0}, apart


@pytest.mark.parametrize("command", ["exact.py --rounds 2", "overhead.py --rounds 2 --width 16 --batch 8"])
def test_the_data_parallel_ones_run(command: str) -> None:
    assert "ratio" in (said := run(command)) or "exact / default" in said


def test_the_recorder_of_check_is_measured() -> None:
    said = run("script_check.py --sizes 1M --rounds 2")
    assert re.search(r"1\.0 M +\d+\.\d +\d\.\d{3} +\(", said), said


def test_each_kind_of_save_is_measured() -> None:
    said = run("checkpoint_cost.py --megabytes 0.3 --step 0.01 --rounds 2 --steps 2")
    kinds = ("memory", "disk", "background", "torch async_save")
    assert all(re.search(rf"^{kind} .* ratio \d+\.\d+ \[", said, re.MULTILINE) for kind in kinds), said


def test_a_probe_is_printed_and_held_against_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = run("probe.py --ranks 2 --seconds 6 --check")
    assert "2 busy, 1 threads each" in said and "all_reduce of 2" in said and said.count("points, middle") == 2, said


def test_ways_to_compress_are_set_beside_ddp() -> None:
    said = run(f"compress.py {TINY} --torch")
    shares = {row.split()[0]: float(found[1]) for row in said.splitlines() if (found := re.search(r"\( *(\S+)\)", row))}
    assert 0.49 < shares["bf16"] < 0.51 and shares["topk"] < 0.05 and said.count("not counted") == 3, said


def test_a_slow_worker_is_measured_with_every_bound() -> None:
    said = run("server.py --rounds 1 --workers 3 --wait 0.03 --steps 40")
    rows = [cells[1].strip(" `") for line in said.splitlines() if len(cells := line.split("|")) > 6 and "`" in line]
    assert sorted(rows) == sorted(["sync", *(f"ps,staleness={bound}" for bound in ("0", "4", "16", "none"))]), said


def test_a_large_model_is_planned_from_its_config_to_the_answer() -> None:
    said = run("large.py --cases llama-8b")
    assert "llama-8b on 2x8xH100-80G" in said and "(replayed)" in said, said


def test_uploads_are_broken_in_one_way_and_nothing_is_lost() -> None:
    said = run("remote_checkpoints.py --ranks 1 --only half")
    assert "2 situations; runs with other weights: 0; messages that were missing: 0" in said, said
    assert "optimizer.safetensors has " in said
