"""Steps that a plan has timed are cached for `--layout auto` and for forecasts of the same settings only."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.common.execution import RunOptions, make_task
from paceline.measured_planning.timing.timing_cache import (
    _SETTINGS_OUTSIDE_KEY,
    _key,
    apply_stored_timing,
    load_timings,
    store_timings,
)
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.search.shortlist import apply_measured_times, shortlist
from paceline.trainer.setup.prepare import PreparedJob, prepare
from tests.conftest import SMALL_JOB
from tests.planner.random_plans import forecast

DRAWN, GRID = next(
    pair
    for pair in map(forecast, range(60))
    if len(found := shortlist(pair[0], grid=pair[1])) > 3 and all(one.candidate.tp == 1 for one in found[:3])
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.py").write_text(SMALL_JOB)
    return tmp_path / "job.py"


def ready(job: Path, *words: str) -> PreparedJob:
    return prepare(make_task("plan", str(job), RunOptions(ranks=1, device="cpu", layout="single", quiet=True), words))


def slowest_first(drawn: CostModel = DRAWN, *, most: int = 3) -> list[Estimate]:
    """The first of a plan's options timed so that the last of them is the quickest."""
    found = shortlist(drawn, grid=GRID)
    seconds = sorted((one.step_seconds for one in found[:most]), reverse=True)
    took = {
        str(one.candidate): MeasuredTime(seconds=own, spread=0.1, steps=9, blocks=(8,), between=(1.0, 2.0))
        for one, own in zip(found[:most], seconds, strict=True)
    }
    return apply_measured_times(found, took)


def told(estimates: Any) -> list[tuple[str, float, MeasuredTime | None]]:
    return [(str(one.candidate), one.step_seconds, one.measured_time) for one in estimates]


def test_they_are_found_again_under_another_length_and_microbatch(job: Path) -> None:
    options = slowest_first()
    assert not load_timings(ready(job), DRAWN, grid=GRID).options
    store_timings(ready(job), DRAWN, options)
    for words in ((), ("--train.steps=7", "--train.micro_batch_size=2", "--log.every=3")):
        found = load_timings(ready(job, *words), DRAWN, grid=GRID)
        assert told(found.options) == told(options)
    below = [DRAWN.estimate(one.candidate) for one in options][::-1]
    assert told(found.apply_timings(below)) == told(options[::-1]), (
        "as wrong as the others, in the order that it was given"
    )


def test_every_setting_that_a_step_follows_tells_what_is_kept_apart(job: Path) -> None:
    now = ready(job)
    keys = {_key(now, DRAWN.cluster)}
    for name in ("train", "place", "data"):
        group = getattr(now.settings, name)
        for field in fields(group):
            changed = replace(now.settings, **{name: replace(group, **{field.name: "another"})})
            key = _key(replace(now, settings=changed), DRAWN.cluster)
            is_same = name == "train" and field.name in _SETTINGS_OUTSIDE_KEY
            assert (key in keys) == is_same, f"{name}.{field.name}"
            keys.add(key)


@pytest.mark.parametrize(
    "words", ["--train.precision=bf16", "--data.workers=1", "--job.lr=0.1", "--log.statistics=true"]
)
def test_of_other_settings_there_are_none(job: Path, words: str) -> None:
    store_timings(ready(job), DRAWN, slowest_first())
    assert not load_timings(ready(job, words), DRAWN, grid=GRID).options


def test_a_run_by_name_is_held_against_what_was_timed_of_its_layout(job: Path) -> None:
    options = slowest_first()
    reckoned = [DRAWN.estimate(one.candidate) for one in options]
    assert [apply_stored_timing(ready(job), DRAWN, one) for one in reckoned] == reckoned
    store_timings(ready(job), DRAWN, options)
    found = [apply_stored_timing(ready(job, "--train.steps=7"), DRAWN, one) for one in reckoned]
    expected = [own if own.measured_time else plain for own, plain in zip(options, reckoned, strict=True)]
    assert told(found) == told(expected) and sum(one.measured_time is not None for one in found) == 3
    assert [apply_stored_timing(ready(job, "--train.precision=bf16"), DRAWN, one) for one in reckoned] == reckoned


def test_of_another_model_machine_or_file_there_are_none(job: Path) -> None:
    store_timings(ready(job), DRAWN, slowest_first())
    facts, fleet = DRAWN.profile, DRAWN.cluster
    longer = replace(facts, length=facts.length + 1)
    smaller = replace(fleet, device=replace(fleet.device, memory_bytes=0.99 * fleet.device.memory_bytes))
    assert not load_timings(ready(job), CostModel(profile=longer, cluster=fleet), grid=GRID).options
    assert not load_timings(ready(job), CostModel(profile=facts, cluster=smaller), grid=GRID).options
    rates = replace(fleet.device, bytes_per_second=2 * fleet.device.bytes_per_second)
    for since in (replace(fleet, longer={"ddp": 3.0}), replace(fleet, device=rates)):
        found = load_timings(ready(job), CostModel(profile=facts, cluster=since), grid=GRID)
        assert any(one.measured_time for one in found.options), "runs came out otherwise, or it was probed again"
    job.write_text(SMALL_JOB + "\n# another\n")
    assert not load_timings(ready(job), DRAWN, grid=GRID).options


def test_a_second_plan_adds_to_the_first_and_what_was_refused_stays_so(job: Path) -> None:
    first = slowest_first(most=1)
    store_timings(ready(job), DRAWN.with_profile(replace(DRAWN.profile, refused={"tp": "its heads"})), first)
    store_timings(ready(job), DRAWN, slowest_first(most=2)[-1:])
    store_timings(ready(job), DRAWN, [])
    found = load_timings(ready(job), DRAWN, grid=GRID)
    assert found.forecast.profile.refused == {**DRAWN.profile.refused, "tp": "its heads"}
    assert {str(one.candidate) for one in first if one.measured_time} <= {*found.timed}
    assert all(one.candidate.tp == 1 for one in found.options)


@pytest.mark.parametrize("disturbed", [False, True])
def test_what_two_plans_timed_is_of_one_pace_and_a_busy_machine_has_no_say(job: Path, disturbed: bool) -> None:
    """The second one times two of three, twice as slow: the third has the pace of those that are kept."""
    first = slowest_first(most=3)
    second = [
        replace(
            one,
            measured_time=replace(one.measured_time, seconds=2 * one.measured_time.seconds)
            if one.measured_time
            else None,
        )
        for one in first
    ]
    last = next(one for one in reversed(first) if one.measured_time)
    store_timings(ready(job), DRAWN, first)
    store_timings(ready(job), DRAWN, [one for one in second if one.candidate != last.candidate], disturbed=disturbed)
    found = load_timings(ready(job), DRAWN, grid=GRID).timed
    for one in first:
        if one.measured_time:
            assert found[str(one.candidate)].seconds == pytest.approx(
                one.measured_time.seconds * (1 if disturbed else 2)
            )


def test_what_can_not_be_read_is_not_there(job: Path, tmp_path: Path) -> None:
    store_timings(ready(job), DRAWN, slowest_first())
    (file,) = (tmp_path / "cache/paceline").glob("timed-*.json")
    file.write_text(file.read_text().replace('"spread"', '"width"'))
    assert not load_timings(ready(job), DRAWN, grid=GRID).options
    for wrong in ("NaN", "Infinity", "-1.0", "0", "1e-300", '"foo"', "null"):
        store_timings(ready(job), DRAWN, slowest_first())
        timed = json.loads(file.read_text())
        next(iter(timed["timed"].values()))["seconds"] = json.loads(wrong)
        file.write_text(json.dumps(timed))
        assert not load_timings(ready(job), DRAWN, grid=GRID).options, wrong
    file.write_text("{")
    assert not load_timings(ready(job), DRAWN, grid=GRID).options
