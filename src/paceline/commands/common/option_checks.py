"""Checks that refuse invalid options before a process starts."""

import math
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from paceline.commands.command_table import TrainOptions
from paceline.config.compression import find_method
from paceline.config.layout import Layout, LayoutKind
from paceline.config.merge_settings import RequestedSettings, known_settings
from paceline.config.other_tool_options import OTHER_TOOL_OPTIONS, find_equivalent
from paceline.config.settings import MAX_SECONDS, Settings
from paceline.config.update_rule import find_rule
from paceline.console.formatting import closest_word, did_you_mean
from paceline.errors import PacelineError, UsageError
from paceline.job_parameters import check_against_source, missing_value_error
from paceline.nodes.launcher_options import (
    EXAMPLE_HOST,
    LAUNCHER_OPTIONS,
    PLACE_WORDS,
    SBATCH_OPTIONS,
    SLURM_OPTIONS,
    TIME_LIMITS,
    count_part,
    expand_short_options,
    largest_count,
    option_name,
    option_values,
    slurm_hours,
    translate_launcher_options,
)
from paceline.nodes.node_place import NodePlace
from paceline.nodes.rank_hints import hint_for_nodes, hint_for_submit
from paceline.submit.slurm_option_hints import sbatch_option_hint

_MIN_TYPO_LENGTH = 5  # a shorter name resembles too many options of other tools
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(?!\d|,)")
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


def refuse_on_nodes(
    place: NodePlace, *, ranks: int | None, layout: Layout | None, settings: Settings | None
) -> list[PacelineError]:
    """Return errors for options that a run on several nodes does not have."""
    problems: list[PacelineError] = []
    if ranks is not None:
        per_node = ranks // place.num_nodes if ranks % place.num_nodes == 0 else ranks
        hint = f"--ranks-per-node {max(1, per_node)}, the number of processes on each machine"
        problems.append(UsageError(f"--ranks {ranks} with --nodes.", hint=hint))
    if settings is not None and settings.survive.min_ranks is not None:
        hint = "leave it out; --nodes 2:4:HOST continues with fewer nodes"
        problems.append(UsageError("survive.min_ranks needs one machine.", hint=hint))
    if layout is not None and layout.kind is LayoutKind.THREADS:
        problems.append(UsageError("layout threads is one process on one machine.", hint="--layout ddp"))
    return problems


def word_hints(
    problems: Sequence[PacelineError], *, place: NodePlace | None, is_submitted: bool
) -> list[PacelineError]:
    """Return the problems with hints in the options of the command: only on one machine, it takes `--ranks`."""
    for problem in problems:
        if is_submitted:
            problem.hint = hint_for_submit(problem.hint, num_nodes=1 if place is None else place.num_nodes)
        elif place is not None:
            problem.hint = hint_for_nodes(problem.hint, nodes=place.option)
    return list(problems)


@dataclass(frozen=True, kw_only=True)
class TypedOptions:
    """The words that were typed after a verb, and the options that the verb has, by their names."""

    verb: str
    arguments: Sequence[str]
    option_types: Mapping[str, Any]
    takes_settings: bool

    def problems(self) -> list[PacelineError]:
        """Return errors for options that the verb does not have, and for values that must be finite numbers."""
        problems: list[PacelineError] = []
        is_sbatch = self.verb == "submit"
        words = expand_short_options(self.arguments, is_sbatch=is_sbatch)
        meant = replace(self, arguments=words)
        for typed, word, following in zip(self.arguments, words, [*words[1:], ""], strict=False):
            long_flag, equals, value = word.partition("=")
            flag = long_flag if typed == word else "-np" if typed == "-np" else typed[:2]
            name = long_flag[2:].replace("-", "_")
            value = value if equals else "" if following.startswith("--") else following
            if not long_flag.startswith("--"):
                continue
            if typed != word or name not in {*self.option_types, "help"}:
                cause, hint = unknown_option_hint(meant, long_flag, value, shown=flag)
                problems.append(UsageError(f"{self.verb} has no option {flag}.", cause=cause, hint=hint))
            else:
                problems += number_problems(flag, value, self.option_types.get(name))
        return problems

    def accepts(self, hint: str) -> bool:
        """Return whether all options and settings that a hint says are there to be typed after the verb."""
        if not hint.startswith("--"):  # words, or another command
            return True
        flags = [word[2:].partition("=")[0] for word in hint.split() if word.startswith("--")]
        return all(
            flag.replace("-", "_") in self.option_types or (self.takes_settings and is_setting_name(flag))
            for flag in flags
        )

    @property
    def takes_host(self) -> bool:
        """Return whether the verb's `--nodes` names a host, too."""
        return "node" in self.option_types


def is_setting_name(name: str) -> bool:
    """Return whether a setting has this name; any parameter of the job may be one."""
    return name in known_settings() or name.startswith("job.")


def unknown_option_hint(typed: TypedOptions, flag: str, value: str, *, shown: str) -> tuple[str, str]:
    """Return the likely cause and what to type in place of an option that the verb does not have.

    The verb accepts what is to be typed. `shown` is the option as it was typed, `-n` for the flag `--ntasks`.
    """
    verb, name = typed.verb, option_name(flag)
    if verb == "compare" and name in ("update", "updates", "compress"):
        cause = "`compare --layouts` always trains with --update sync and --compress none"
        hint = "paceline train JOB once with each update rule or compression, then paceline compare RUN RUN"
        return cause, hint
    own = next((known for known in (name, f"{name}s") if known in typed.option_types), "")
    meant = own or name  # --rank means --ranks, not powersgd's option rank
    found = _own_option_hint(typed, own, value) if own else _other_option_hint(typed, name, value, shown=shown)
    if found is None:
        foreign = (*OTHER_TOOL_OPTIONS, *LAUNCHER_OPTIONS, *SLURM_OPTIONS) if len(name) > _MIN_TYPO_LENGTH else ()
        meant = own or closest_word(name, (*typed.option_types, *foreign))
        if meant in typed.option_types:
            found = _own_option_hint(typed, meant, value)
        elif meant:
            found = _other_option_hint(typed, meant, value, shown=shown)
    if found is not None:
        return found
    if meant in typed.option_types:
        return f"did you mean {as_flag(meant)!r}?", f"paceline {verb} --help"
    if name in {field.name for field in fields(TrainOptions)}:
        return f"it is an option of `paceline train`, and {verb} has none of that name", f"leave {shown} out"
    return "", f"paceline {verb} --help"


def as_flag(name: str) -> str:
    """Return the option with this name, as it is typed."""
    return f"--{name.replace('_', '-')}"


def _own_option_hint(typed: TypedOptions, name: str, value: str) -> tuple[str, str] | None:
    """Return the hint to type one of the verb's own options; None if it does not take the value."""
    flag, option_type = as_flag(name), typed.option_types[name]
    if name == "nodes" and not typed.takes_host:
        value = count_part(value) if typed.verb == "submit" else largest_count(value)
    if option_type is bool:
        return f"did you mean {flag!r}?", flag
    if not value or value.startswith("--") or number_problems(flag, value, option_type):
        return None
    return f"did you mean {flag!r}?", f"{flag} {shlex.quote(value)}"


def _other_option_hint(typed: TypedOptions, name: str, value: str, *, shown: str) -> tuple[str, str] | None:
    """Return the hint for an option of another tool or of another option; None if there is none for this verb."""
    flag = as_flag(name)
    left_out = shown if len(shown) <= len("-np") else flag
    if name in LAUNCHER_OPTIONS:
        words = typed.arguments
        if name not in {option_name(word.partition("=")[0]) for word in words}:  # a typing error of it
            words = [*words, f"{flag}={value}"]
        line = translate_launcher_options(words, typed.option_types, takes_host=typed.takes_host)
        if line:
            cause = f"; the same line on every machine, of which {EXAMPLE_HOST} is the first" * (EXAMPLE_HOST in line)
            return f"it is another launcher's word{cause}", line
        own = dict(option_values(words)).get("nodes", "")
        has_host = typed.takes_host and own != count_part(own) and LAUNCHER_OPTIONS[name] in PLACE_WORDS
        cause = "--nodes says where the nodes meet" if has_host else f"paceline {typed.verb} needs no such option"
        return cause, f"leave {left_out} out"
    if typed.verb == "submit" and name in TIME_LIMITS:
        hours = slurm_hours(value)
        return "the time limit is given in hours", f"--hours {24 if hours is None else hours:g}"
    if typed.verb == "submit" and name in (*SLURM_OPTIONS, *SBATCH_OPTIONS):
        return sbatch_option_hint(name, left_out, value, typed=dict(option_values(typed.arguments)))
    if name in SLURM_OPTIONS:
        return _slurm_option_hint(typed.verb, name, value)
    rule, method = find_rule(name), find_method(name)
    option_text = f"{name}={value}" if value else name
    hints = [find_equivalent(flag, value)]
    if rule is not None:
        hints.append(("it belongs to --update", f"--update {rule}" + ("" if rule == name else f",{option_text}")))
    if method is not None:
        hints.append(
            ("it belongs to --compress", f"--compress {method}" + ("" if method == name else f",{option_text}"))
        )
    return next((hint for hint in hints if hint is not None and typed.accepts(hint[1])), None)


def _slurm_option_hint(verb: str, name: str, value: str) -> tuple[str, str] | None:
    """Return the hint for an option that Slurm itself takes; None for a verb that Slurm does not start."""
    value = value or "VALUE"
    if verb not in ("doctor", "train"):
        return None
    line = f"srun {as_flag(name)} {shlex.quote(value)} --ntasks-per-node 1 paceline {verb} ..."
    hint = f"{line}; without Slurm, type the line on the nodes that you want, with their number in --nodes"
    return "it is an option of srun, which starts the command on the nodes", hint


def number_problems(flag: str, value: str, option_type: Any) -> list[PacelineError]:
    """Return an error if the option takes a number and `value` is not a number, is infinite or is NaN."""
    option_types = {option_type, *get_args(option_type)}
    number_type = int if int in option_types else float if float in option_types else None
    if number_type is None or not value or value.startswith("--") or value == "None":
        return []
    expected = "an integer" if number_type is int else "a number"
    try:
        number = number_type(value)
        if number_type is int or math.isfinite(number):
            return []
        expected = "a finite number"
    except ValueError:
        pass
    return [UsageError(f"{flag} {value}: expected {expected}.", hint=_number_hint(flag, value, number_type))]


def refuse_wait(seconds: float) -> list[PacelineError]:
    """Return an error if `--wait` is not a possible number of seconds."""
    if 0 < seconds <= MAX_SECONDS:
        return []
    return [UsageError(f"--wait {seconds:g} must be above 0, and at most a year, {MAX_SECONDS}.", hint="--wait 60")]


def _number_hint(flag: str, value: str, number_type: type) -> str:
    """Return a value of the same kind as the wrong one: its first number, or the hours of a time limit."""
    if flag == "--node" and ":" in value:
        return f"--nodes {value}"
    hours = slurm_hours(value) if flag == "--hours" else None
    if hours is not None:
        return f"{flag} {hours:g}"
    text = value.replace(",", "" if _THOUSANDS.match(value) else ".")
    number = re.match(r"[1-9]\d*", text) if number_type is int else re.search(r"\d+(\.\d+)?", text)
    if number is not None and not 0 < float(number[0]) < math.inf:
        number = None
    return f"{flag} {number[0] if number else 2 if number_type is int else 0.5}"
