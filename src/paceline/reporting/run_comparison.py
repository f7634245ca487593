"""A comparison of runs: settings that differ, where the losses diverge, results and speed, as a table and as a page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from paceline.config.merge_settings import default_value, known_settings
from paceline.filesystem.atomic_files import write_text
from paceline.reporting.run_history import History, json_or_none, read_history
from paceline.reporting.run_report import html_document, run_status
from paceline.reporting.settings_table import read_settings
from paceline.reporting.svg.charts import Curve, draw_chart
from paceline.reporting.verify_section import format_number
from paceline.run_folder.run_folder import RunFolder

_IGNORED_PREFIXES = ("run_dir", "checkpoint.", "watch.")  # of settings that do not change the training
_MACHINE_FACTS = ("python", "torch_build", "host", "cpu", "cores", "threads", "gpus")  # keys of env.json
_SPEED_METRICS = {  # the logged metric of each row
    "median_step_seconds": "time/step",
    "median_samples_per_second": "samples_per_second",
    "median_tokens_per_second": "tokens_per_second",
}
_CURVES = ("grad_norm", "lr", "samples_per_second", "tokens_per_second", "time/step", "memory/peak_gib")


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run in a comparison. `speed` has medians over all logged steps but the first."""

    name: str
    history: History
    settings: dict[str, str]
    result: dict[str, Any]
    speed: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class LossDivergence:
    """The differences between the losses of a run and those of the first run."""

    run: str
    common: int
    """The number of steps that both runs logged."""
    until: int
    """The last step that both runs logged."""
    steps: tuple[int, int]
    """The last step of the first run, and of this run."""
    first: int | None
    """The first step whose losses differ; None if there is none."""
    beyond_floor: int | None
    """The first step whose losses differ by more than `floor`; None if there is none."""
    floor: float
    """The noise floor, relative to the loss."""
    largest: float
    """The largest difference, relative to the loss."""

    @property
    def text(self) -> str:
        """The divergence in words."""
        if not self.common:
            return "no logged step in common"
        return f"{self._divergence_text}{self._length_note}"

    @property
    def _length_note(self) -> str:
        """A note on how many steps were compared, if the runs have different lengths."""
        if self.steps[0] == self.steps[1]:
            return ""
        return f"; compared up to step {self.until:,}: the first run has {self.steps[0]:,} steps, this one {self.steps[1]:,}"

    @property
    def _divergence_text(self) -> str:
        if self.first is None:
            return f"equal in every digit on all {self.common} logged steps in common"
        if self.beyond_floor is None:
            return f"from step {self.first}, never by more than {self.largest:.1e} of the loss"
        return f"from step {self.first}; by more than {self.floor:.0e} of the loss from step {self.beyond_floor}"


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Read the runs. They are named by their folders, or by full paths if the folders' names are not distinct."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_read_run(name, RunFolder(path)) for name, path in zip(names, paths, strict=True)]


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[str | None]]:
    """Return the settings and facts (`_read_conditions`) that differ between the runs, with the value of each run."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def default_setting_text(name: str) -> str:
    """Return the text for a setting that a run does not set: the default value, if it is known."""
    if name.startswith("job."):
        return "the job's own"
    if name not in known_settings():
        return "–"
    default = default_value(name)
    if default is None:
        return "not set"
    return f"{str(default).lower() if isinstance(default, bool) else default} (default)"


def loss_divergences(runs: Sequence[ComparedRun], *, floor: float) -> list[LossDivergence]:
    """Compare each run's losses with those of the first run; `floor` is a relative difference."""
    reference = dict(runs[0].history.points("loss"))
    divergences = []
    for run in runs[1:]:
        pairs = [(step, reference[step], loss) for step, loss in run.history.points("loss") if step in reference]
        differences = [(int(step), _relative_difference(one, other)) for step, one, other in pairs]
        divergences.append(
            LossDivergence(
                run=run.name,
                common=len(pairs),
                until=max((int(step) for step, _, _ in pairs), default=0),
                steps=(runs[0].history.last_step(), run.history.last_step()),
                first=next((step for step, size in differences if size > 0), None),
                beyond_floor=next((step for step, size in differences if size > floor), None),
                floor=floor,
                largest=max((size for _, size in differences), default=0.0),
            )
        )
    return divergences


def comparison_table(
    runs: Sequence[ComparedRun], divergences: Sequence[LossDivergence]
) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return groups of rows: the title of each group and its rows, which have a name and one cell per run."""
    results = list(dict.fromkeys(name for run in runs for name in run.result))
    speeds = [name for name in _SPEED_METRICS if any(name in run.speed for run in runs)]
    groups = [
        (
            "settings that differ",
            [
                (n, [v if v is not None else default_setting_text(n) for v in row])
                for n, row in differing_settings(runs).items()
            ],
        ),
        ("difference of the losses", [("", ["–", *(p.text for p in divergences)])]),
        ("result", [(n, [format_number(s.result.get(n)) for s in runs]) for n in results]),
        ("speed", [(n.replace("_", " "), [format_number(s.speed.get(n)) for s in runs]) for n in speeds]),
    ]
    return [(title, rows) for title, rows in groups if rows]


def write_comparison_page(runs: Sequence[ComparedRun], divergences: Sequence[LossDivergence], *, to: Path) -> Path:
    """Write `compare.html`: the table, and the curves of all runs in shared charts."""
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    parts = [f"<header><h1>{' <small>against</small> '.join(escape(run.name) for run in runs)}</h1></header>"]
    for title, rows in comparison_table(runs, divergences):
        body = "".join(
            f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
            for name, cells in rows
        )
        text = f'<div class="wide"><table><tr><th></th>{head}</tr>{body}</table></div>'
        parts.append(f"<section><h2>{escape(title.capitalize())}</h2>{text}</section>")
    names = sorted({name for run in runs for name in run.history.metric_names()})
    metrics = [name for name in names if name == "loss" or name.startswith(("loss/", "eval/"))]
    charts = "".join(_overlay_chart(runs, name) for name in [*metrics, *(n for n in _CURVES if n in names)])
    charts += "".join(_charts_against(runs, name) for name in metrics)
    parts.insert(1, f'<section><h2>Curves</h2><div class="charts">{charts}</div></section>' if charts else "")
    write_text(to, html_document(" · ".join(run.name for run in runs), parts))
    return to


def _overlay_chart(runs: Sequence[ComparedRun], name: str) -> str:
    return draw_chart(name, [Curve(name=run.name, points=run.history.points(name)) for run in runs])


def _charts_against(runs: Sequence[ComparedRun], name: str) -> str:
    """Draw a metric over samples, over seconds and over bytes sent.

    The charts show how much of each a run needs to reach a value of the metric. An axis is left out if a run has fewer
    than two points on it.
    """
    axes = {
        "samples": [run.history.samples() for run in runs],
        "seconds": [run.history.seconds() for run in runs],
        "bytes sent by rank 0": [run.history.sent_bytes() for run in runs],
    }
    charts = ""
    for axis, axis_points in axes.items():
        pairs = zip(runs, axis_points, strict=True)
        curves = [Curve(name=run.name, points=run.history.points_against(name, points)) for run, points in pairs]
        if all(len(curve.points) > 1 for curve in curves):
            charts += draw_chart(f"{name} against {axis}", curves)
    return charts


def _read_run(name: str, run: RunFolder) -> ComparedRun:
    history = read_history(run)
    latest = history.latest_values()
    ranks = dict.fromkeys(str(start.get("ranks")) for start in history.starts)
    result: dict[str, Any] = {
        "status": run_status(history),
        "ranks": ", then ".join(ranks),
        "attempts": len(history.starts),
    }
    result["steps"] = history.last_step()
    result |= {n: latest[n] for n in sorted(latest) if n == "loss" or n.startswith(("loss/", "eval/"))}
    result["memory/peak_gib"] = latest.get("memory/peak_gib")
    weights = json_or_none(run.path / "weights.json")
    if isinstance(weights, dict):
        result["weights"] = str(weights.get("digest"))[:16]
    speed = {}
    for title, metric in _SPEED_METRICS.items():
        values = [v for _, v in history.points(metric)[1:] if math.isfinite(v)]
        if values:
            speed[title] = median(values)
    return ComparedRun(name=name, history=history, settings=_read_conditions(run), result=result, speed=speed)


def _read_conditions(run: RunFolder) -> dict[str, str]:
    """Return a run's settings, batch sizes, machine and package versions, which may explain differences of runs."""
    conditions = {n: v.strip('"') for n, (v, _) in read_settings(run).items() if not n.startswith(_IGNORED_PREFIXES)}
    plan, env = json_or_none(run.path / "plan.json"), json_or_none(run.path / "env.json")
    for name in ("global_batch_size", "micro_batch_size", "num_micro"):
        if isinstance(plan, dict) and name in plan:
            conditions[name] = str(plan[name])
    if isinstance(env, dict):
        conditions |= {name: str(env[name]) for name in _MACHINE_FACTS if name in env}
        job, packages = env.get("job"), env.get("packages")
        for group, versions in (("", packages), ("job ", job)):
            conditions |= (
                {f"{group}{n}": str(v)[:12] for n, v in versions.items()} if isinstance(versions, dict) else {}
            )
    return conditions


def _relative_difference(loss: float, reference: float) -> float:
    if loss == reference or (math.isnan(loss) and math.isnan(reference)):
        return 0.0
    if not (math.isfinite(loss) and math.isfinite(reference)):
        return math.inf
    return abs(loss - reference) / max(abs(loss), abs(reference))
