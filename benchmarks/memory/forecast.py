"""Forecast against measurement: each setting of a measured file replayed on memory without numbers.

    python -m benchmarks.memory.forecast measured.jsonl [--only 'llama*'] [--out FILE]

A line for each setting: the most bytes that were live on any rank, by the allocator's own events, and how far the
forecast is from it; whether the bytes of parameters, gradients and optimizer are those of every rank; mean and worst.
Then the same of what was resident, by the kernel, where that was more than 500 MiB: the forecast has a fixed reserve
for it, of a process with torch in it.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.memory.measured import Setting

from paceline.commands.common.execution import RunOptions, make_task
from paceline.errors import PacelineError
from paceline.measured_planning.depth_extrapolation import DepthExtrapolation
from paceline.measured_planning.memory_replay import StageMemory, replay
from paceline.measured_planning.profile.truncated_model import build_once, truncate_depth
from paceline.planner.hardware.local_cluster import RESERVE_BYTES
from paceline.trainer.setup.prepare import prepare

_LARGE, _NEAR = 500 << 20, 0.1  # bytes, of what is resident
_PARTS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A setting as forecast and as measured. `error` is of the most that any rank had live; the kernel says of it all
    what is `resident_bytes`."""

    name: str
    measured_bytes: int
    forecast_bytes: int
    resident_bytes: int
    exact: bool
    phase: str
    seconds: float

    @property
    def error(self) -> float:
        return self.forecast_bytes / self.measured_bytes - 1

    @property
    def resident_error(self) -> float:
        return (self.forecast_bytes + RESERVE_BYTES["cpu"]) / self.resident_bytes - 1

    def __str__(self) -> str:
        exact = "exact" if self.exact else "PARTS DIFFER"
        return (
            f"{self.name:<66}{self.measured_bytes:>14,}  {self.error:+8.3%}  {self.resident_bytes:>14,}  "
            f"{self.resident_error:+6.1%}  {exact}  {self.phase:<10}{self.seconds:5.1f} s"
        )


def forecast(setting: Setting) -> list[StageMemory]:
    """Of every stage, as `plan` replays it: a deep model by few of its blocks, where they tell of all."""
    common = RunOptions(ranks=setting.ranks, layout=setting.layout, device="cpu", quiet=True)
    ready = prepare(make_task("compare", f"benchmarks.memory.jobs:{setting.family}", common, setting.overrides))
    depths = truncate_depth(ready.job)[1]
    if ready.plan.mesh.pp > 1 or len(depths) != 1:
        return replay(ready.job, ready.settings, ready.plan)
    return DepthExtrapolation(build_once(ready.job, seed=0), ready.settings).replay(ready.settings, ready.plan, depths)


def against(rows: Sequence[Mapping[str, Any]]) -> Held:
    """The rows of one setting, one for each rank."""
    first, began = rows[0], time.monotonic()
    setting = Setting(
        family=first["family"],
        layout=first["layout"],
        ranks=first["ranks"],
        batch=first["global_batch"],
        micro=first["micro_batch"],
        precision=first["precision"],
        optimizer=first["update"],
        job=first["job"],
    )
    stages = forecast(setting)
    each = len(rows) // len(stages)
    most = max(rows, key=lambda row: row["peak_live"])
    pairs = [(stage, rows[place * each]) for place, stage in enumerate(stages)]
    return Held(
        name=first["name"],
        measured_bytes=most["peak_live"],
        forecast_bytes=max(stage.peak.total for stage in stages),
        resident_bytes=max(row["rss_peak"] for row in rows),
        exact=all(getattr(stage.between_steps, part) == row[part] for stage, row in pairs for part in _PARTS),
        phase=most["phase"],
        seconds=time.monotonic() - began,
    )


def main(words: Sequence[str] | None = None) -> int:
    """1 where a setting could not be replayed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.forecast", description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--only", default="*")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    grouped: dict[str, list[dict[str, Any]]] = {}
    for line in asked.measured.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        grouped.setdefault(row["name"], []).append(row)
    found, failed, said = [], 0, list[str]()
    for name, rows in grouped.items():
        if not fnmatch(name, asked.only):
            continue
        try:
            held = against(rows)
        except PacelineError as error:
            failed += 1
            print(f"{name}: NOT HAD: {error}", file=sys.stderr)
            continue
        found.append(held)
        said.append(str(held))
        print(said[-1], flush=True)
    said += _summary(found)
    print("\n".join(said[len(found) :]))
    if asked.out is not None:
        asked.out.write_text("\n".join(said) + "\n", encoding="utf-8")
    return int(failed > 0)


def _summary(found: Sequence[Held]) -> list[str]:
    errors = sorted((abs(held.error), held.name) for held in found)
    if not errors:
        return []
    middle, (worst, name) = mean(error for error, _ in errors), errors[-1]
    said = [f"{len(errors)} settings: mean error {middle:.2%}, worst {worst:.2%} ({name})"]
    large = sorted((abs(held.resident_error), held.name) for held in found if held.resident_bytes > _LARGE)
    if large:
        middle, (worst, name) = mean(error for error, _ in large), large[-1]
        near = sum(error <= _NEAR for error, _ in large)
        said.append(
            f"{len(large)} of them above 500 MiB resident: mean error {middle:.1%}, worst {worst:.1%} ({name}), "
            f"{near} within {_NEAR:.0%}"
        )
    return said


if __name__ == "__main__":
    raise SystemExit(main())
