"""Fallback layouts of a run, and how measurements correct the forecast."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.hardware.benchmark_results import MachineFingerprint
from paceline.planner.hardware.cluster import cluster_from_json
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.search.branch_and_bound import search, search_exhaustively
from paceline.planner.search.fallbacks import build_forecast, fallback_layouts
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.profiling.calibration_store import (
    median_forecast_ratios,
    plan_key,
    read_stored_plan,
    record_forecast_ratio,
    save_plan,
)
from paceline.profiling.machine_benchmarks.benchmark_cache import cache_folder

SIZES = Decoder(layers=4, width=1024, mlp_width=4096, heads=16, kv_heads=16, vocabulary=32000)
FACTS = build_decoder_profile(SIZES, name="small", length=1024, global_batch_size=16)
MARK = MachineFingerprint(
    cpu="a cpu", cores=2, torch="2.13", gpus=(), kernels="default", device="cpu", ranks=4, threads=1
)


@pytest.fixture
def forecast() -> CostModel:
    return CostModel(profile=FACTS, cluster=parse_cluster("4xA100-80G"))


def test_each_rung_is_the_quickest_that_needs_so_much_less(forecast: CostModel) -> None:
    first = search(forecast).fastest
    assert first is not None
    reserve, last = forecast.cluster.device.reserve_bytes, first
    found = list(fallback_layouts(forecast, first))
    assert len(found) >= 3
    for rung in found:
        most = reserve + 0.85 * (last.peak_bytes - reserve)
        assert rung.peak_bytes <= most
        best = search_exhaustively(forecast.with_memory_limit(most)).fastest
        assert best is not None and rung.step_seconds == best.step_seconds >= last.step_seconds
        last = rung


def test_a_rung_crosses_as_json(forecast: CostModel) -> None:
    best = search(forecast).fastest
    assert best is not None
    for rung in (
        build_forecast(best),
        build_forecast(best, replayed=(7, {"parameters": 7, "total": 7}), time_ratio=2.0, source="auto"),
    ):
        assert LayoutForecast(**json.loads(json.dumps(rung.as_json()))) == rung
    assert rung.peak_bytes == 7 and rung.parts == {"parameters": 7} and rung.longer == 2.0
    assert rung.micro_batch_size == best.candidate.micro_batch_size and best.layout in str(rung)


@pytest.mark.parametrize(
    "longer", [{"ddp": 3.0}, {"ddp": 0.2, "": 0.6}, {"": 1.7}, {"zero1": 0.5, "fsdp": 4.0, "": 2.0}]
)
def test_corrected_forecasts_are_searched_as_exactly(forecast: CostModel, longer: dict[str, float]) -> None:
    fleet = replace(forecast.cluster, longer=longer, fuller={"ddp": 1.3, "": 0.8})
    assert cluster_from_json(json.loads(json.dumps(fleet.as_json()))) == fleet
    own = CostModel(profile=FACTS, cluster=fleet)
    best, every = search(own).best, search_exhaustively(own).best
    assert {name: one.step_seconds for name, one in best.items()} == {
        name: one.step_seconds for name, one in every.items()
    }
    for family, one in every.items():
        plain = forecast.estimate(one.candidate)
        assert one.step_seconds == pytest.approx(plain.step_seconds * longer.get(family, longer.get("", 1.0)))
        more = 1.3 if family == "ddp" else 1.0
        reserve = fleet.device.reserve_bytes
        assert one.peak_bytes - reserve == pytest.approx(more * (plain.peak_bytes - reserve))


def test_the_ratios_of_runs_are_kept_by_family_and_by_machine(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr(
        "paceline.profiling.calibration_store.cache_file",
        lambda mark: cache_folder(environ=environ) / f"probe-{mark.ranks}.json",
    )
    assert median_forecast_ratios(MARK) == ({}, {})
    for ratio in (1.0, 9.0, 1.2, 1.1, 1.3, 1.4):
        record_forecast_ratio(MARK, "ddp", longer=ratio, fuller=None)
    record_forecast_ratio(MARK, "fsdp", longer=2.2, fuller=1.5)
    longer, fuller = median_forecast_ratios(MARK)
    assert longer == {"ddp": 1.3, "fsdp": 2.2, "": pytest.approx(1.75)} and fuller == {"fsdp": 1.5, "": 1.5}
    assert median_forecast_ratios(replace(MARK, ranks=2)) == ({}, {})
    (file,) = (tmp_path / "paceline").iterdir()
    for text in ("", "[]", '{"longer": 3, "fuller": {"ddp": "x", "fsdp": [0, -1, "y"]}}'):
        file.write_text(text)
        assert median_forecast_ratios(MARK) == ({}, {})
    record_forecast_ratio(MARK, "ddp", longer=1.5, fuller=None)
    assert median_forecast_ratios(MARK)[0]["ddp"] == 1.5


def test_a_kept_plan_is_of_the_jobs_file_as_it_is_now(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("paceline.profiling.calibration_store.cache_folder", lambda: tmp_path / "cache")
    job = tmp_path / "job.py"
    job.write_text("def make_job(width=3): ...\n")

    def key(text: str = "", *, precision: str = "fp32", batch: int = 8, compiles: bool = False, **settings: Any) -> str:
        own = {"precision": precision, "global_batch_size": batch, "compiles": compiles}
        return plan_key(str(job) + text, settings=settings, **own)  # type: ignore[arg-type]

    first = key()
    save_plan(first, {"facts": 1})
    assert read_stored_plan(first) == {"facts": 1} and read_stored_plan("other") is None
    assert key(**{"train.steps": 3}) == first
    others = [key(**{"job.width": 5}), key(precision="bf16"), key(batch=4), key(compiles=True)]  # type: ignore[arg-type]
    assert len({first, *others}) == 5
    job.write_text("def make_job(width=4): ...\n")
    assert key() != first
