"""Checks that refuse invalid options before a process starts."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.config.compression import find_method
from paceline.config.layout import Layout, LayoutKind
from paceline.config.merge_settings import RequestedSettings
from paceline.config.other_tool_options import find_equivalent
from paceline.config.settings import Settings
from paceline.config.update_rule import find_rule
from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError
from paceline.job_parameters import check_against_source, missing_value_error
from paceline.nodes.rank_hints import hint_for_nodes

_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 3800  # limits of file systems; a path needs room for names below it


def check_job_parameters(
    parameters: dict[str, tuple[str, str]] | None, requested: RequestedSettings
) -> list[PacelineError]:
    """Return errors for `job.` settings that are unknown to `make_job` or have the wrong type, and for missing ones.

    `parameters` maps each name to the source of the parameter's annotation and default; None if they are unknown.
    """
    if parameters is None:
        return []
    values = {name[4:]: value for name, value in requested.values.items() if name.startswith("job.")}
    return [
        *_unknown_parameters(parameters, list(values), requested),
        *check_against_source(values, sources=parameters),
        *(missing_value_error(name) for name, (_, default) in parameters.items() if not default and name not in values),
    ]


def _unknown_parameters(
    parameters: Collection[str], names: Sequence[str], requested: RequestedSettings
) -> list[PacelineError]:
    return [
        UsageError(
            f"make_job has no parameter {name!r}.",
            where=requested.origins.get(f"job.{name}", ""),
            cause=did_you_mean(name, parameters),
            hint=f"it takes: {', '.join(parameters) or 'none'}",
        )
        for name in names
        if name not in parameters
    ]


def refuse_job_parameters(requested: RequestedSettings) -> list[PacelineError]:
    """Return an error for each `job.` setting, because a job that is already an object has no parameters."""
    return [
        UsageError(
            f"{name} is a parameter of make_job, but this job is already built.",
            where=requested.origins.get(name, ""),
            hint=f"make_job({name[4:]}={value!r})",
        )
        for name, value in requested.values.items()
        if name.startswith("job.")
    ]


def refuse_invalid_run_dir(text: str) -> list[PacelineError]:
    """Return an error if `--run-dir` is not a valid path, whether or not it exists."""
    if not text.strip():
        return [UsageError("--run-dir is empty: is a variable unset?", hint="--run-dir runs/first, or leave it out")]
    longest = max(len(os.fsencode(part)) for part in Path(text).parts)
    if longest > _MAX_NAME_BYTES or len(os.fsencode(text)) > _MAX_PATH_BYTES or "\0" in text:
        if "\0" in text:
            reason = "it contains a NUL character"
        elif longest > _MAX_NAME_BYTES:
            reason = f"its longest part has {longest:,} bytes, at most {_MAX_NAME_BYTES} are allowed"
        else:
            reason = f"it has {len(os.fsencode(text)):,} bytes, at most {_MAX_PATH_BYTES:,} are allowed"
        return [UsageError(f"--run-dir {text[:40]}... is not a valid path: {reason}.", hint="--run-dir runs/first")]
    return []


def refuse_on_nodes(*, ranks: int | None, layout: Layout | None, settings: Settings | None) -> list[PacelineError]:
    """Return errors for options that a run on several nodes does not have."""
    problems: list[PacelineError] = []
    if ranks is not None:
        hint = "--ranks-per-node, the number of processes on each machine"
        problems.append(UsageError(f"--ranks {ranks} with --nodes.", hint=hint))
    if settings is not None and settings.survive.min_ranks is not None:
        hint = "leave it out; --nodes 2:4:HOST continues with fewer nodes"
        problems.append(UsageError("survive.min_ranks needs one machine.", hint=hint))
    if layout is not None and layout.kind is LayoutKind.THREADS:
        problems.append(UsageError("layout threads is one process on one machine.", hint="--layout ddp"))
    return problems


def word_for_nodes(problems: Sequence[PacelineError], *, num_nodes: int) -> list[PacelineError]:
    """Return the problems with hints that say `--ranks-per-node`, where they say `--ranks` for one machine."""
    for problem in problems:
        problem.hint = hint_for_nodes(problem.hint, num_nodes=num_nodes)
    return list(problems)


def misplaced_option_hint(verb: str, flag: str, value: str) -> tuple[str, str] | None:
    """Return the likely cause and the command to type if the option is another tool's, or belongs to another option."""
    name = flag.removeprefix("--")
    if verb == "compare" and name in ("update", "updates", "compress"):
        cause = "`compare --layouts` always trains with --update sync and --compress none"
        hint = "paceline train JOB once with each update rule or compression, then paceline compare RUN RUN"
        return cause, hint
    if (equivalent := find_equivalent(flag, value)) is not None:
        return equivalent
    option_text = f"{name}={value}" if value else name
    rule, method = find_rule(name), find_method(name)
    if rule is not None:
        return "it belongs to --update", f"--update {rule}" if rule == name else f"--update {rule},{option_text}"
    if method is not None:
        return (
            "it belongs to --compress",
            f"--compress {method}" if method == name else f"--compress {method},{option_text}",
        )
    return None
