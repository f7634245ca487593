"""The simulated time of a planned step agrees with hand-computed times, closed forms and the program's simulation."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.commands.simulate import simulate
from paceline.errors import PacelineError, UsageError
from paceline.planner.advice.named_layouts import evaluate_named_layouts
from paceline.planner.advice.recommendations import advise
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.model_costs.layer_chain import build_chain
from paceline.planner.search.search_space import SearchSpace, candidates
from paceline.planner.simulation.candidate_simulation import simulate_candidate
from paceline.planner.simulation.event_simulator import simulate_step
from paceline.planner.simulation.exposed_communication import exposed_seconds_by_name
from paceline.planner.simulation.failure_forecast import CheckpointCosts, forecast_failures
from paceline.planner.simulation.goodput import goodput
from paceline.planner.simulation.overlap import Collective, StepPoint
from paceline.run_folder.plan_file import write_advice
from paceline.schedule import Costs, build
from tests.planner.random_plans import forecast, pipeline_timeline
from tests.work_count import count_calls

HOUR = 3600.0
SIZES = Decoder(layers=8, width=512, mlp_width=2048, heads=8, vocabulary=1000)


def made(cluster: str = "2x8xA100-80G", *, batch: int = 64, sizes: Decoder = SIZES) -> CostModel:
    return CostModel(
        profile=build_decoder_profile(sizes, name="x", length=1024, global_batch_size=batch),
        cluster=parse_cluster(cluster),
    )


def some(seed: int, *, most: int) -> tuple[CostModel, list[Candidate]]:
    drawn, grid = forecast(seed)
    found = list(candidates(drawn.profile, drawn.cluster, grid))
    random.Random(seed).shuffle(found)
    return drawn, found[:most]


@pytest.mark.parametrize("seed", range(12))
def test_parts_add_up_and_one_stage_is_the_closed_form(seed: int) -> None:
    drawn, found = some(seed, most=25)
    for candidate in found:
        step = simulate_candidate(drawn, candidate=candidate)
        assert sum(step.seconds.values()) == pytest.approx(step.step_seconds)
        assert all(value >= -1e-12 * step.step_seconds for value in step.seconds.values()), step.seconds
        if candidate.pp == 1:
            closed = {name: value for name, value in step.estimate.seconds.parts.items() if name != "bubble"}
            here = {name: value for name, value in step.seconds.items() if name not in ("bubble", "borders")}
            assert here == pytest.approx(closed, rel=1e-9, abs=1e-12)
            assert step.step_seconds == pytest.approx(step.estimate.step_seconds)
            assert step.bubble == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_a_pipeline_is_the_simulation_of_its_schedule(seed: int) -> None:
    drawn, found = some(seed, most=400)
    for candidate in [one for one in found if one.pp > 1][:8]:
        step = simulate_candidate(drawn, candidate=candidate)
        other = pipeline_timeline(drawn, candidate=candidate)
        assert step.timeline.makespan == pytest.approx(other.makespan)
        program = build(
            candidate.schedule, ranks=candidate.pp, micro=drawn.num_micro(candidate), virtual=candidate.virtual
        )
        counts, ends = drawn.part_counts(candidate), drawn.step_end_seconds(candidate)
        held = [ends[tuple(counts[stage] for stage in program.stages_of(rank))] for rank in range(candidate.pp)]
        stops = [
            max(span.stop for span in step.timeline.compute_spans if span.rank == rank) for rank in range(candidate.pp)
        ]
        summed = max(stop + end["gradients"] for stop, end in zip(stops, held, strict=True))
        once = sum(max(end[name] for end in held) for name in ("update", "offload", "start"))
        assert step.step_seconds == pytest.approx(summed + once)


def test_a_step_by_hand() -> None:
    """1F1B on 2 ranks, 4 microbatches: 4 passes of the slower rank, one of the other, there and back over the link."""
    drawn = made("2xA100-80G", batch=4)
    candidate = Candidate(pp=2, micro_batch_size=1, precision="bf16")
    step = simulate_candidate(drawn, candidate=candidate)
    one, other = drawn.stages_with_sharding(candidate)
    hop = drawn.hop_seconds(candidate)
    assert build_chain(drawn.profile).num_blocks == 8 and hop > 0 and other.seconds > one.seconds
    first, last = one.forward + hop, one.backward_input + one.backward_weight + hop
    ends = drawn.step_end_seconds(candidate).values()
    update = max(end["update"] for end in ends) + drawn.efficiency.step_seconds
    assert step.timeline.makespan == pytest.approx(first + 4 * other.seconds + last)
    assert step.step_seconds == pytest.approx(first + 4 * other.seconds + last + update)
    assert step.seconds["borders"] == pytest.approx(2 * hop)
    assert step.seconds["compute"] == pytest.approx(2 * (one.seconds + other.seconds))
    assert step.seconds["bubble"] == pytest.approx(one.seconds + 4 * other.seconds - 2 * (one.seconds + other.seconds))


def test_exposed_is_told_by_name_and_sums() -> None:
    """A message waits at both ends of the pipeline, and twice in its middle, where the third microbatch comes late."""
    program, costs = (
        build("1f1b", ranks=2, micro=3),
        Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, transfer=0.25),
    )
    collectives = [
        Collective(name="sums", point=StepPoint.FORWARD, seconds=0.5),
        Collective(name="gradients", point=StepPoint.END, seconds=2.0, overlap=0.5),
    ]
    found = exposed_seconds_by_name(program, costs=costs, collectives=collectives)
    assert found == pytest.approx({"borders": 4 * 0.25, "sums": 2.0, "gradients": 1.0})
    whole = simulate_step(program, costs=costs, collectives=collectives)
    assert sum(found.values()) == pytest.approx(whole.exposed_seconds)


def test_mfu_counts_the_models_operations_once() -> None:
    drawn = made("8xH100-80G")
    plain = simulate_candidate(drawn, candidate=Candidate(dp_replicate=8, micro_batch_size=1, precision="bf16"))
    again = simulate_candidate(
        drawn, candidate=Candidate(dp_replicate=8, micro_batch_size=1, precision="bf16", remat="full")
    )
    tokens = 64 * 1024
    layers = 8 * (4 * 512 * 512 + 3 * 512 * 2048)
    matrices = 6 * tokens * (layers + 2 * 512 * 1000)
    attention = 12 * 8 * 512 * 1024 * tokens
    assert plain.flops == pytest.approx(matrices + attention) and attention > 0
    assert plain.mfu == pytest.approx(plain.flops / (plain.step_seconds * 8 * 989e12), rel=2e-3)
    assert again.flops == plain.flops and again.seconds["again"] > 0 and again.mfu < plain.mfu


def test_thousands_of_ranks_are_quick() -> None:
    sizes = Decoder(layers=126, width=16384, mlp_width=53248, heads=128, kv_heads=8, vocabulary=128256)
    drawn = made("2048x8xH100-80G", batch=2048, sizes=sizes)
    candidate = Candidate(pp=16, dp_shard=128, zero=1, tp=8, schedule="interleaved", virtual=7, remat="full")
    step, calls = count_calls(lambda: simulate_candidate(drawn, candidate=candidate))
    assert step.ranks == 16_384 and calls < 600_000, "about a tenth of a second"


@pytest.mark.parametrize("step_seconds", [0.7, 11.5, 400.0])
@pytest.mark.parametrize("write", [0.0, 90.0])
def test_the_best_distance_is_that_of_trying_all(step_seconds: float, write: float) -> None:
    checkpoints = CheckpointCosts(stall_seconds=20.0, write_seconds=write, restart_seconds=300.0, every=200)
    found = forecast_failures(
        step_seconds=step_seconds, ranks=4096, device_mean_seconds=50_000 * HOUR, checkpoints=checkpoints
    )
    least = max(1, math.ceil(write / step_seconds))
    tried = {n: goodput(hazard=found.hazard, interval_seconds=n * step_seconds).useful for n in range(least, 5000)}
    assert tried[found.best_every] == max(tried.values())
    assert found.hazard.mean_seconds == pytest.approx(50_000 * HOUR / 4096)
    assert found.gain == pytest.approx(max(tried.values()) - tried[200]) and found.gain >= 0
    assert found.as_json()["asked"]["steps_a_day"] == pytest.approx(tried[200] * 86_400 / step_seconds)


def told(drawn: CostModel, folder: Path, layouts: list[str]) -> Path:
    """A plan.json, as `plan` writes it."""
    answer = (
        evaluate_named_layouts(drawn, layouts).as_json() if layouts else advise(drawn, grid=SearchSpace()).as_json()
    )
    own = {
        "facts": drawn.profile.as_json(), "efficiency": drawn.efficiency.as_json(), "cluster": drawn.cluster.as_json()
    }  # fmt: skip
    write_advice(folder, json.loads(json.dumps({**answer, **own})))
    return folder


def test_a_plan_in_a_file_is_simulated(tmp_path: Path) -> None:
    drawn = made()
    folder = told(drawn, tmp_path, [])
    best = advise(drawn, grid=SearchSpace()).recommended
    found = simulate(folder, failures="50000 h", every=1000, page=tmp_path / "step.html")
    assert found.value is not None and found.exit_code == 0
    assert found.value["layout"] == best.layout
    assert found.value["step_seconds"] == simulate_candidate(drawn, candidate=best.candidate).step_seconds
    assert found.value["failures"]["asked"]["every"] == 1000
    assert "closed forms" in found.text and "best: every " in found.text
    html = (tmp_path / "step.html").read_text()
    assert html.count("<svg") == 3 and "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    other = simulate(folder / "plan.json", layout="pp=4,dp=4,schedule=gpipe", page=tmp_path / "step.svg")
    assert other.value is not None and other.value["layout"] == "pp=4,dp_replicate=4,schedule=gpipe"
    assert (tmp_path / "step.svg").read_text().startswith("<svg") and "failures" not in other.value


@pytest.mark.parametrize(
    ("words", "said", "to_do"),
    [
        ({"failures": "50000"}, "has no unit", '"50000 h"'),
        ({"failures": "50000 GB"}, "is not a unit of time", '"50000 h"'),
        ({"failures": "1 ms"}, "leaves no useful time", "for one device"),
        ({"every": 10}, "has no effect without --failures", "--failures"),
        ({"failures": "50000 h", "every": 0}, "--every 0", "--every 1000"),
        ({"failures": "50000 h", "every": 1, "write_seconds": 900}, "takes 900 s to write", "at least"),
        ({"failures": "50000 h", "checkpoint_seconds": -1}, "stall_seconds=-1", ""),
        ({"layout": "dpp"}, "dpp", "ddp"),
        ({"layout": "tp=16,dp=2"}, "needs 32 ranks, you have 16", "tp=16"),
        ({"cluster": "8xH100-80G"}, "is a plan, which has its own", "paceline simulate"),
    ],
)
def test_nonsense_is_refused(words: dict[str, object], said: str, to_do: str, tmp_path: Path) -> None:
    folder = told(made(), tmp_path, [])
    with pytest.raises(PacelineError) as refused:
        simulate(folder, **words)  # type: ignore[arg-type]
    assert said in str(refused.value) and to_do in str(refused.value)


def test_a_folder_without_a_plan_is_told(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"(?s)is a folder without plan\.json.*did not finish"):
        simulate(tmp_path)


def test_a_plan_in_which_nothing_fits_says_so(tmp_path: Path) -> None:
    sizes = Decoder(layers=80, width=8192, mlp_width=28672, heads=64, kv_heads=8, vocabulary=128256)
    folder = told(made("8xT4", sizes=sizes), tmp_path, ["ddp"])
    with pytest.raises(UsageError, match="no layout that fits"):
        simulate(folder)
    found = simulate(folder, layout="ddp")
    assert "it does not fit: " in found.text and found.value is not None and not found.value["fits"]


@pytest.mark.parametrize("seed", range(4))
def test_what_runs_took_longer_is_longer_here_too(seed: int) -> None:
    drawn, found = some(seed, most=6)
    slow = CostModel(
        profile=drawn.profile, cluster=replace(drawn.cluster, longer={"": 1.7}), efficiency=drawn.efficiency
    )
    for candidate in found:
        step, slower = simulate_candidate(drawn, candidate=candidate), simulate_candidate(slow, candidate=candidate)
        assert slower.step_seconds == pytest.approx(1.7 * step.step_seconds)
        assert slower.relative_difference == pytest.approx(step.relative_difference, abs=1e-9)
