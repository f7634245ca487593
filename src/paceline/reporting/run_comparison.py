"""A comparison of runs: settings that differ, where the losses diverge, results and speed; as rows and as a page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from paceline.config.loading import default_of, known_settings
from paceline.filesystem.atomic_files import write_text
from paceline.reporting.run_history import History, json_or_none, read_history
from paceline.reporting.run_report import document, status_of
from paceline.reporting.settings_table import settings_of
from paceline.reporting.svg.charts import Curve, chart
from paceline.reporting.verify_section import number
from paceline.run_folder.run_folder import RunFolder

_PLACES = ("run_dir", "checkpoint.", "watch.")
_MACHINE = ("python", "torch_build", "host", "cpu", "cores", "threads", "gpus")
_SPEED = {
    "median_step_seconds": "time/step",
    "median_samples_per_second": "samples_per_second",
    "median_tokens_per_second": "tokens_per_second",
}
_CURVES = ("grad_norm", "lr", "samples_per_second", "tokens_per_second", "time/step", "memory/peak_gib")


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run in a comparison."""

    name: str
    history: History
    asked: dict[str, str]
    result: dict[str, Any]
    speed: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class LossDivergence:
    """The divergence of a run's losses from the first run's: the first unequal step, and the first beyond `floor`.

    `steps` are the number of steps of the first run and of this one; `until` is the last logged step of both.
    """

    run: str
    common: int
    until: int
    steps: tuple[int, int]
    first: int | None
    beyond_floor: int | None
    floor: float
    largest: float

    @property
    def text(self) -> str:
        """The divergence as a sentence."""
        if not self.common:
            return "no logged step in common"
        return f"{self._where}{self._until}"

    @property
    def _until(self) -> str:
        """A note on how many steps were compared, if the runs have different lengths."""
        if self.steps[0] == self.steps[1]:
            return ""
        return f"; compared to step {self.until:,}: the first has {self.steps[0]:,} steps, this one {self.steps[1]:,}"

    @property
    def _where(self) -> str:
        if self.first is None:
            return f"equal in every digit on all {self.common} logged steps in common"
        if self.beyond_floor is None:
            return f"from step {self.first}, never by more than {self.largest:.1e} of the loss"
        return f"from step {self.first}; by more than {self.floor:.0e} of the loss from step {self.beyond_floor}"


def read_sides(paths: Sequence[Path]) -> list[ComparedRun]:
    """Read the runs; their names are shortened as far as they stay distinct."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_side(name, RunFolder(path)) for name, path in zip(names, paths, strict=True)]


def settings_apart(sides: Sequence[ComparedRun]) -> dict[str, list[str | None]]:
    """Return settings, layout and machine facts that differ between the runs."""
    names = dict.fromkeys(name for side in sides for name in side.asked)
    rows = {name: [side.asked.get(name) for side in sides] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def default_setting_text(name: str) -> str:
    """Return the text of a setting's default value."""
    if name.startswith("job."):
        return "the job's own"
    if name not in known_settings():
        return "–"
    default = default_of(name)
    if default is None:
        return "not set"
    return f"{str(default).lower() if isinstance(default, bool) else default} (default)"


def loss_divergences(sides: Sequence[ComparedRun], *, floor: float) -> list[LossDivergence]:
    """Compare each run's losses with those of the first; `floor` is relative."""
    first = dict(sides[0].history.points("loss"))
    found = []
    for side in sides[1:]:
        pairs = [(step, first[step], loss) for step, loss in side.history.points("loss") if step in first]
        apart = [(int(step), _relative(one, other)) for step, one, other in pairs]
        found.append(
            LossDivergence(
                run=side.name,
                common=len(pairs),
                until=max((int(step) for step, _, _ in pairs), default=0),
                steps=(sides[0].history.reached(), side.history.reached()),
                first=next((step for step, size in apart if size > 0), None),
                beyond_floor=next((step for step, size in apart if size > floor), None),
                floor=floor,
                largest=max((size for _, size in apart), default=0.0),
            )
        )
    return found


def comparison_table(
    sides: Sequence[ComparedRun], parted: Sequence[LossDivergence]
) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return titled groups of rows, with one cell per run."""
    results = list(dict.fromkeys(name for side in sides for name in side.result))
    speeds = [name for name in _SPEED if any(name in side.speed for side in sides)]
    groups = [
        (
            "set differently",
            [
                (n, [v if v is not None else default_setting_text(n) for v in row])
                for n, row in settings_apart(sides).items()
            ],
        ),
        ("losses differ", [("", ["–", *(p.text for p in parted)])]),
        ("result", [(n, [number(s.result.get(n)) for s in sides]) for n in results]),
        ("speed", [(n.replace("_", " "), [number(s.speed.get(n)) for s in sides]) for n in speeds]),
    ]
    return [(title, rows) for title, rows in groups if rows]


def write_page(sides: Sequence[ComparedRun], parted: Sequence[LossDivergence], *, to: Path) -> Path:
    """Write `compare.html`: the table, and the curves of all runs in shared charts."""
    head = "".join(f"<th>{escape(side.name)}</th>" for side in sides)
    parts = [f"<header><h1>{' <small>against</small> '.join(escape(side.name) for side in sides)}</h1></header>"]
    for title, rows in comparison_table(sides, parted):
        body = "".join(
            f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
            for name, cells in rows
        )
        text = f'<div class="wide"><table><tr><th></th>{head}</tr>{body}</table></div>'
        parts.append(f"<section><h2>{escape(title.capitalize())}</h2>{text}</section>")
    names = sorted({name for side in sides for name in side.history.names()})
    drawn = [name for name in names if name == "loss" or name.startswith(("loss/", "eval/"))]
    charts = "".join(_overlaid(sides, name) for name in [*drawn, *(n for n in _CURVES if n in names)])
    charts += "".join(_against(sides, name) for name in drawn)
    parts.insert(1, f'<section><h2>Curves</h2><div class="charts">{charts}</div></section>' if charts else "")
    write_text(to, document(" · ".join(side.name for side in sides), parts))
    return to


def _overlaid(sides: Sequence[ComparedRun], name: str) -> str:
    return chart(name, [Curve(name=side.name, points=side.history.points(name)) for side in sides])


def _against(sides: Sequence[ComparedRun], name: str) -> str:
    """Draw the curves against samples, seconds and bytes, if all runs have them: steps alone do not show the cost."""
    axes = {
        "samples": [side.history.samples() for side in sides],
        "seconds": [side.history.seconds() for side in sides],
        "bytes sent by rank 0": [side.history.sent() for side in sides],
    }
    charts = ""
    for axis, known in axes.items():
        pairs = zip(sides, known, strict=True)
        curves = [Curve(name=side.name, points=side.history.against(name, points)) for side, points in pairs]
        if all(len(curve.points) > 1 for curve in curves):
            charts += chart(f"{name} against {axis}", curves)
    return charts


def _side(name: str, run: RunFolder) -> ComparedRun:
    history = read_history(run)
    last = history.last()
    ranks = dict.fromkeys(str(start.get("ranks")) for start in history.starts)
    result: dict[str, Any] = {
        "status": status_of(history),
        "ranks": ", then ".join(ranks),
        "attempts": len(history.starts),
    }
    result["steps"] = history.reached()
    result |= {n: last[n] for n in sorted(last) if n == "loss" or n.startswith(("loss/", "eval/"))}
    result["memory/peak_gib"] = last.get("memory/peak_gib")
    weights = json_or_none(run.path / "weights.json")
    if isinstance(weights, dict):
        result["weights"] = str(weights.get("digest"))[:16]
    speed = {}
    for title, metric in _SPEED.items():
        values = [v for _, v in history.points(metric)[1:] if math.isfinite(v)]
        if values:
            speed[title] = median(values)
    return ComparedRun(name=name, history=history, asked=_asked(run), result=result, speed=speed)


def _asked(run: RunFolder) -> dict[str, str]:
    """Return the settings, and the facts of plan and machine that may explain a difference."""
    found = {n: v.strip('"') for n, (v, _) in settings_of(run).items() if not n.startswith(_PLACES)}
    plan, env = json_or_none(run.path / "plan.json"), json_or_none(run.path / "env.json")
    for name in ("global_batch_size", "micro_batch_size", "num_micro"):
        if isinstance(plan, dict) and name in plan:
            found[name] = str(plan[name])
    if isinstance(env, dict):
        found |= {name: str(env[name]) for name in _MACHINE if name in env}
        job, packages = env.get("job"), env.get("packages")
        for group, of in (("", packages), ("job ", job)):
            found |= {f"{group}{n}": str(v)[:12] for n, v in of.items()} if isinstance(of, dict) else {}
    return found


def _relative(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))
