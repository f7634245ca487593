"""The `compare` verb: compares runs, recordings of `pl.record`, or layouts of one job."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

from paceline.commands.command_table import CompareOptions, VerbOutput
from paceline.commands.common.comparisons.compare_layouts import (
    LayoutComparison,
    compare_layouts,
    page_line,
    refuse_mixed_arguments,
)
from paceline.commands.common.execution import RunOptions
from paceline.errors import ExitCode, UsageError, raise_all
from paceline.reporting.run_comparison import (
    ComparedRun,
    LossDivergence,
    comparison_table,
    differing_settings,
    loss_divergences,
    read_runs,
    write_comparison_page,
)
from paceline.run_folder.run_folder import RunFolder
from paceline.verification.fingerprints.compare_recordings import Comparison, compare_recordings, first_rank_difference
from paceline.verification.fingerprints.fingerprint import Recording, has_recording, num_ranks, read_recording
from paceline.verification.rung_result import RECORDING_FLOOR


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The result of `compare` for runs; its fields are the keys of `--json`."""

    exit_code: int
    text: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, list[str | None]] = field(default_factory=dict)
    losses: list[dict[str, Any]] = field(default_factory=list)
    recordings: list[dict[str, Any]] = field(default_factory=list)
    first_difference: dict[str, Any] | None = None
    page: str | None = None


@overload
def compare(*runs: str | Path, page: str | Path | None = None) -> RunComparison: ...


@overload
def compare(
    job: str | Path,
    /,
    *,
    layouts: Sequence[str],
    ranks: int | None = None,
    steps: int = 8,
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    device: str = "auto",
    page: str | Path | None = None,
) -> LayoutComparison: ...


def compare(
    *runs: str | Path,
    layouts: Sequence[str] = (),
    ranks: int | None = None,
    steps: int = 8,
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    device: str = "auto",
    page: str | Path | None = None,
) -> RunComparison | LayoutComparison:
    """Compare each run with the first one in a table; compare recordings up to the first difference.

    With `layouts`, run one job (`"job.py"`) in each layout: a few steps on the same samples, one after another.

    Raises:
        UsageError: fewer than two runs, a folder that is neither a run nor a recording, or wrong settings.
    """
    if layouts:
        common = RunOptions(ranks=ranks, device=device, run_dir=None if run_dir is None else str(run_dir))
        return compare_layouts(
            _single_job(runs), layouts=layouts, common=common, overrides=overrides, steps=steps, page=page
        )
    if len(runs) < 2:
        raise UsageError(f"compare needs two runs, got {len(runs)}.", hint="paceline compare RUN RUN")
    paths = [Path(run) for run in runs]
    _check_paths(paths)
    recordings = [read_recording(path) for path in paths] if all(has_recording(path) for path in paths) else []
    comparisons = _compare_with_first(recordings)
    if comparisons and not all(_is_run(path) for path in paths):
        return _build_comparison([], [], comparisons, page=None, notes=_notes(recordings))
    compared_runs = read_runs(paths)
    divergences = loss_divergences(compared_runs, floor=RECORDING_FLOOR)
    replaced = page is not None and Path(page).exists()
    page_path = write_comparison_page(compared_runs, divergences, to=Path(page)) if page is not None else None
    return _build_comparison(
        compared_runs, divergences, comparisons, page=page_path, replaced=replaced, notes=_notes(recordings)
    )


def _single_job(runs: Sequence[str | Path]) -> str:
    if len(runs) != 1:
        raise UsageError(
            f"layouts= takes one job, got {len(runs)}.", hint='pl.compare("job.py", layouts=["ddp", "fsdp"])'
        )
    if not isinstance(runs[0], str | Path):
        raise UsageError(
            f"compare got a {type(runs[0]).__name__}, expected the path of a job.",
            cause="each process imports the job itself",
            hint='pl.compare("job.py", layouts=["ddp", "fsdp"], ranks=2)',
        )
    return str(runs[0])


def _check_paths(paths: list[Path]) -> None:
    raise_all([problem for path in dict.fromkeys(paths) if (problem := _path_problem(path)) is not None])
    kinds = {_is_run(path) for path in paths}
    if len(kinds) > 1 and not all(has_recording(path) for path in paths):
        unrecorded = next(path for path in paths if not has_recording(path))
        raise UsageError(
            f"{unrecorded} is a run without a recording, so it can't be compared with a recording.",
            hint="record both: pl.record(run.model, run.optimizers, run.folder / 'record')",
        )


def _path_problem(path: Path) -> UsageError | None:
    if not path.is_dir():
        return UsageError(f"there is no run {path} to compare.", hint="ls runs/*/")
    if _is_run(path) or has_recording(path):
        return None
    return UsageError(
        f"{path} is neither a run nor a recording.",
        cause="it has no events.jsonl, no metrics.jsonl and no rank-0.jsonl",
        hint="ls runs/*/",
    )


def _is_run(path: Path) -> bool:
    run = RunFolder(path)
    return run.events.exists() or run.metrics.exists()


def _compare_with_first(recordings: Sequence[Recording]) -> list[tuple[Path, Comparison]]:
    """Return a comparison of each recording with the first."""
    comparisons = []
    for other in recordings[1:]:
        first = recordings[0]
        same_ranks = num_ranks(other.path) == num_ranks(first.path)
        comparisons.append((other.path, compare_recordings(first.records, other.records, same_ranks=same_ranks)))
    return comparisons


def _notes(recordings: Sequence[Recording]) -> list[str]:
    return list(dict.fromkeys(recording.note for recording in recordings if recording.note))


def _build_comparison(
    compared_runs: list[ComparedRun],
    divergences: list[LossDivergence],
    comparisons: list[tuple[Path, Comparison]],
    *,
    page: Path | None,
    replaced: bool = False,
    notes: Sequence[str] = (),
) -> RunComparison:
    first_difference = next((comparison.first for _, comparison in comparisons if comparison.first is not None), None)
    lines = _table_lines(compared_runs, divergences)
    for path, comparison in comparisons:
        lines.append(comparison.text if len(comparisons) == 1 else f"{path}: {comparison.text}")
        lines += _rank_divergence_lines(path) if comparison.first is not None else []
    lines += notes
    if page is not None:
        lines.append(f"\n{page_line(page, replaced=replaced)}")
    return RunComparison(
        exit_code=int(ExitCode.DIFFERENT if first_difference is not None else ExitCode.DONE),
        text="\n".join(lines),
        runs=[
            {"run": str(compared_run.history.run.path), **compared_run.result, **compared_run.speed}
            for compared_run in compared_runs
        ],
        settings=differing_settings(compared_runs) if compared_runs else {},
        losses=[asdict(divergence) for divergence in divergences],
        recordings=[{"run": str(path), **asdict(comparison)} for path, comparison in comparisons],
        first_difference=first_difference,
        page=str(page) if page is not None else None,
    )


def _rank_divergence_lines(path: Path) -> list[str]:
    """Return a line about the first difference between the ranks of one run; an empty list if they are equal."""
    try:
        ranks = [read_recording(path, rank=rank).records for rank in range(num_ranks(path))]
    except UsageError as error:
        return [f"{path}: its ranks were not compared with each other: {error.what}"]
    divergence = first_rank_difference(ranks)
    if divergence is None:
        return []
    return [
        f"{path}: rank {divergence['rank']} diverges from rank 0 at step {divergence['step']}, "
        f"first in {divergence['parameter']}"
    ]


def _table_lines(compared_runs: list[ComparedRun], divergences: list[LossDivergence]) -> list[str]:
    if not compared_runs:
        return []
    groups = comparison_table(compared_runs, divergences)
    cells = [row for _, rows in groups for row in rows]
    width = max(len(name) for name, _ in cells) + 2
    columns = [
        max(len(row[column]) for row in [[s.name for s in compared_runs], *(c for _, c in cells)])
        for column in range(len(compared_runs))
    ]

    def line(name: str, row: list[str]) -> str:
        padded = "  ".join(cell.ljust(size) for cell, size in zip(row, columns, strict=True))
        return f"  {name:<{width}}{padded}".rstrip()

    lines = [line("", [compared_run.name for compared_run in compared_runs])]
    for title, rows in groups:
        lines += [title, *(line(name, row) for name, row in rows)]
    return lines


def run_verb(options: CompareOptions, settings: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    if options.layouts:
        return _compare_layouts(options, settings)
    refuse_mixed_arguments(options.runs, settings)
    comparison = compare(*options.runs, page=options.page)
    return comparison.exit_code, asdict(comparison), comparison.text


def _compare_layouts(options: CompareOptions, settings: list[str]) -> VerbOutput:
    if len(options.runs) != 1:
        raise UsageError(f"--layouts takes one job, got {len(options.runs)}.", hint="compare JOB --layouts A B")
    common = RunOptions(
        ranks=options.ranks,
        device=options.device,
        config=options.config,
        run_dir=options.run_dir,
        dry_run=options.dry_run,
        quiet=options.json,
    )
    comparison = compare_layouts(
        options.runs[0],
        layouts=options.layouts,
        common=common,
        overrides=settings,
        steps=options.steps,
        page=options.page,
    )
    return comparison.exit_code, asdict(comparison), comparison.text
