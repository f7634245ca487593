"""The closed form of a rank's memory against replays: many models, layouts and microbatches, drawn at random.

    python -m benchmarks.closed [--only 'llama*'] [--each 10] [--seed 1] [--out FILE] [--rows FILE.jsonl]

A model's numbers are learnt as `plan` learns them, layouts are drawn from the planner's own grid, and each is replayed:
the run's own step, placed as it would be, on memory without numbers. A line says the peak of both and what the closed
form takes it for; at the end mean and worst of each family, and of each part what share of the replayed peak it is off.
Slack and the reserve are left out: a replay has neither.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean
from typing import Any

from paceline.commands.common.execution import RunOptions, make_task
from paceline.config.update_rule import parse_update
from paceline.errors import PacelineError
from paceline.measured_planning.finalist_replay import set_stages
from paceline.measured_planning.memory_replay import StageMemory, replay
from paceline.measured_planning.profile.profile_job import profile_model
from paceline.measured_planning.profile.truncated_model import build_once
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import Memory
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.planner.search.search_space import (
    SearchSpace,
    data_parallel_choices,
    microbatch_choices,
    model_parallel_choices,
    recompute_choices,
    schedule_choices,
)
from paceline.trainer.setup.prepare import PreparedJob, prepare

GRID = SearchSpace(
    offload=((),), schedules=("gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zbv"), virtual=(2, 3),

)  # fmt: skip
PARTS = ("parameters", "optimizer", "gradients", "moving")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of a family on clusters; `job` are the family's parameters."""

    family: str
    clusters: tuple[str, ...]
    batch: int
    precision: str = "fp32"
    job: Mapping[str, Any]

    def __str__(self) -> str:
        sizes = ",".join(f"{name[:2]}{value}" for name, value in self.job.items())
        return f"{self.family} {sizes} b{self.batch} {self.precision}"


_GPUS = ("8xH100-80G", "2x8xH100-80G", "8x8xH100-80G")
_FEW = ("2xH100-80G", "4xH100-80G", "8xA100-40G")
_CPUS = ("2xcpu", "4xcpu")


def _case(words: str, clusters: tuple[str, ...], **job: Any) -> Case:
    """`llama 64 bf16`: a family, its batch, its precision."""
    family, batch, precision = words.split()
    return Case(family=family, clusters=clusters, batch=int(batch), precision=precision, job=job)


CASES = (
    _case("llama 32 fp32", _FEW, width=512, depth=8, length=256, vocabulary=8192),
    _case("llama 64 bf16", _GPUS, width=4096, depth=8, length=2048, heads=32, vocabulary=32000),
    _case("llama 128 bf16", _GPUS, width=8192, depth=4, length=4096, heads=64, vocabulary=32000),
    _case("llama 64 fp32", _GPUS, width=2048, depth=16, length=1024, heads=16, vocabulary=32000),
    _case("gpt2 32 fp32", _FEW, width=768, depth=12, length=512, heads=12, vocabulary=50257),
    _case("gpt2 64 bf16", _GPUS, width=1600, depth=12, length=1024, heads=25, vocabulary=50304, dropout=0.0),
    _case("mixtral 32 fp32", _FEW, width=512, depth=6, length=256, heads=8, experts=8),
    _case("mixtral 64 bf16", _GPUS, width=2048, depth=4, length=1024, heads=16, experts=8, vocabulary=32000),
    _case("t5 32 fp32", _FEW, width=512, depth=6, length=512, heads=8, vocabulary=32128),
    _case("bert 32 bf16", _FEW, width=768, depth=12, length=512, heads=12, vocabulary=30522),
    _case("vit 64 fp32", _FEW, width=768, depth=12, side=224, patch=16, heads=12),
    _case("nano 32 fp32", _FEW, width=512, depth=8, length=512, heads=8, vocabulary=32000),
    _case("mlp 64 fp32", _FEW, width=4096, depth=8),
    _case("llama 16 fp32", _CPUS, width=512, depth=6, length=256, vocabulary=8192),
)


@dataclass(frozen=True, kw_only=True)
class Against:
    """One setting: bytes by the closed form and as replayed, of its fullest rank. `moving` comes and goes."""

    case: str
    cluster: str
    family: str
    candidate: Candidate
    reckoned: Mapping[str, float]
    replayed: Mapping[str, float]
    detail: Mapping[str, float]
    micro: int
    seconds: float

    @property
    def peak(self) -> float:
        """As replayed."""
        return sum(self.replayed.values())

    @property
    def error(self) -> float:
        """Of the peak."""
        return sum(self.reckoned.values()) / self.peak - 1

    def part_error(self, part: str) -> float:
        """As a share of the replayed peak."""
        return (self.reckoned[part] - self.replayed[part]) / self.peak

    def __str__(self) -> str:
        parts = " ".join(f"{part[:4]} {self.part_error(part):+.1%}" for part in PARTS)
        name = f"{self.case} | {self.cluster} | {self.candidate} of {self.micro}"
        return f"{name:<110}{self.peak / 2**30:8.2f} GiB {self.error:+7.1%}  ({parts})"


def ready_for(case: Case) -> PreparedJob:
    """Its job with its settings."""
    words = {f"job.{name}": value for name, value in case.job.items()}
    words |= {"train.global_batch_size": case.batch, "train.precision": case.precision}
    common = RunOptions(ranks=1, layout="single", device="cpu", quiet=True)
    task = make_task("plan", f"benchmarks.memory.jobs:{case.family}", common, [f"--{k}={v}" for k, v in words.items()])
    ready = prepare(task)
    return replace(ready, job=build_once(ready.job, seed=ready.settings.seed))


def drawn(forecast: CostModel, draw: random.Random, *, each: int) -> list[Candidate]:
    """So many, of every family of layouts in turn; with several microbatches where there can be."""
    every: dict[str, list[Candidate]] = {}
    for _ in range(60 * each):
        one = _one(forecast, draw)
        if one is not None and one.micro_batch_size <= 8:
            found = every.setdefault(f"{one.family} {one.remat}", [])
            if one not in found:
                found.append(one)
    chosen: list[Candidate] = []
    while every and len(chosen) < each:
        names = list(every)
        draw.shuffle(names)
        for name in names[: each - len(chosen)]:
            chosen.append(every[name].pop(0))
            if not every[name]:
                del every[name]
    return chosen


def _one(forecast: CostModel, draw: random.Random) -> Candidate | None:
    facts = forecast.profile
    ways = list(model_parallel_choices(facts, forecast.cluster, GRID))
    for level in (recompute_choices, microbatch_choices, schedule_choices):
        ways = list(level(draw.choice(ways), facts, GRID)) if ways else []
    ways = list(data_parallel_choices(draw.choice(ways), facts, forecast.cluster, GRID)) if ways else []
    return draw.choice(ways) if ways else None


def replayed_of(ready: PreparedJob, candidate: Candidate, forecast: CostModel) -> StageMemory:
    """Its fullest stage."""
    facts = forecast.profile
    plan = make_execution_plan(
        layout=candidate.layout_spec,
        update=parse_update("sync"),
        resources=Resources(ranks=candidate.ranks, device=forecast.cluster.device.kind),
        facts=JobFacts(global_batch_size=facts.global_batch_size, micro_batch_size=candidate.micro_batch_size),
    )
    settings = set_stages(ready.settings, forecast.estimate(candidate).stages)
    return max(replay(ready.job, settings, plan), key=lambda stage: stage.peak.total)


def against(case: Case, cluster: str, ready: PreparedJob, forecast: CostModel, candidate: Candidate) -> Against:
    """One setting, both ways."""
    began = time.monotonic()
    held = replayed_of(ready, candidate, forecast).peak
    memory = forecast.memory(candidate)
    return Against(
        case=str(case),
        cluster=cluster,
        family=candidate.family,
        candidate=candidate,
        reckoned=reckoned(memory),
        replayed={
            "parameters": held.parameters + held.buffers,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "moving": held.activations,
        },
        detail=memory.parts,
        micro=forecast.num_micro(candidate),
        seconds=time.monotonic() - began,
    )


def reckoned(memory: Memory) -> dict[str, float]:
    """By what a replay tells apart."""
    moving = memory.peak_bytes - memory.state_bytes - memory.slack - memory.reserve
    return {**{part: getattr(memory, part) for part in PARTS[:-1]}, "moving": moving}


def compared(cases: Sequence[Case], *, each: int, seed: int) -> Iterator[Against]:
    """Setting by setting; what a run would refuse is left out and said."""
    for place, case in enumerate(cases):
        ready = ready_for(case)
        most = max(parse_cluster(cluster).ranks for cluster in case.clusters)
        try:
            facts = profile_model(ready.job, ready.settings, max_ranks=most)
        except (PacelineError, RuntimeError) as error:
            print(f"{case}: not learnt: {error}", file=sys.stderr)
            continue
        draw = random.Random(f"{seed} {case} {place}")
        for number, cluster in enumerate(case.clusters):
            forecast = CostModel(profile=facts, cluster=parse_cluster(cluster))
            share = each // len(case.clusters) + (number < each % len(case.clusters))
            for candidate in drawn(forecast, draw, each=share):
                try:
                    yield against(case, cluster, ready, forecast, candidate)
                except (PacelineError, RuntimeError) as error:
                    print(f"{case} | {cluster} | {candidate}: refused: {error}", file=sys.stderr)


def summary(found: Sequence[Against]) -> list[str]:
    """Of each family of layouts, of each model, of each part, and of all."""
    lines = ["", "| | settings | mean | worst | |", "| --- | --- | --- | --- | --- |"]
    groups: dict[str, list[Against]] = {}
    for one in found:
        for key in (f"1{one.family}", f"2remat={one.candidate.remat}", f"3{one.case}", "4all"):
            groups.setdefault(key, []).append(one)
    for key in sorted(groups):
        own = groups[key]
        worst = max(own, key=lambda one: abs(one.error))
        lines.append(
            f"| {key[1:]} | {len(own)} | {mean(abs(one.error) for one in own):.1%} | {worst.error:+.1%} | "
            f"{worst.case} {worst.candidate} |"
        )
    lines += ["", "| part, as a share of the peak | mean | worst |", "| --- | --- | --- |"]
    for part in PARTS:
        errors = [one.part_error(part) for one in found]
        lines.append(f"| {part} | {mean(map(abs, errors)):.2%} | {max(errors, key=abs):+.1%} |")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Print each setting and the summary."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.closed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*")
    parser.add_argument("--each", type=int, default=10, help="settings of each model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path, help="every setting as a line of JSON")
    asked = parser.parse_args(words)
    found, lines = [], list[str]()
    for one in compared([c for c in CASES if fnmatch(str(c), asked.only)], each=asked.each, seed=asked.seed):
        found.append(one)
        lines.append(str(one))
        print(lines[-1], flush=True)
    lines += summary(found)
    print("\n".join(lines[len(found) :]))
    if asked.rows is not None:
        asked.rows.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in found), encoding="utf-8")
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
