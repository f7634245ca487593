"""The command line: it parses arguments, runs a verb, prints the result and exits with a code. It needs no torch."""

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_origin, get_type_hints

from paceline import __version__
from paceline.console.formatting import did_you_mean, shorten_line
from paceline.console.output import flush, print_line, replace_closed_streams
from paceline.errors import ExitCode, PacelineError, UsageError, raise_all
from paceline.plugins import resolve

_HELP = """\
usage: paceline VERB JOB [options]        JOB is job.py, job.py:name or pkg.module:name

  new NAME            write an example job: text, digits, hf
  train JOB           train: --ranks N processes, --layout ddp|fsdp|pp|tp|..., --resume
  verify JOB          check that a layout is the same training as one process
  plan JOB            find which layouts fit, and how fast they are: --cluster 8xH100-80G, or --ranks N here
  simulate JOB        simulate a step on thousands of ranks, and the goodput under failures: --failures "50000 h"
  evaluate [RUN]      exact metrics of a checkpoint
  compare RUN RUN     two runs side by side; the first difference of two recordings
  compare JOB --layouts A B   layouts of a job side by side: time, memory, bytes sent, losses
  report [RUN]        write a run's page
  why [RUN]           why a run hangs, failed or ended: the rank, the line of your code, and what to do
  check -- COMMAND    check a training script of any framework: check -- torchrun --nproc-per-node 2 train.py
  record -- COMMAND   record a training script, to compare it with another: --out one; then compare one two
  verify-script       check that a script trains on several ranks as in one process: --one '...' --many '...'
  doctor [JOB]        check this machine, or all nodes before a run: --nodes 3:host1
  submit JOB          write the file for Slurm, Kubernetes, Ray or SageMaker: --to slurm --nodes 2 --ranks-per-node 8
  ckpt ls|verify|diff|consolidate|prune [RUN]
  config JOB          every setting, its value and where it came from

train and verify take --compress bf16|fp16|int8|powersgd|topk and --update pipedream|2bw|local|diloco|ps; train also
takes --update hogwild.
Every setting has one name: --train.steps 100, --train.exact, --job.lr 1e-3, --seed 1.
`paceline VERB --help` prints a verb's options. Exit codes: 0 done, 1 failed, 2 refused, 3 machine, 4 different,
5 can't be judged, 75 stopped and saved (the same command resumes), 130 interrupted (stopped at once)."""

_ALIASES = {
    "--nproc-per-node": "--ranks",
    "--nproc_per_node": "--ranks",
    "--devices": "--ranks",
    "--strategy": "--layout",
}
_OTHER_VERBS = {
    **dict.fromkeys(("resume", "restart", "continue", "requeue"), "resume"),
    **dict.fromkeys(("run", "launch", "start", "fit", "torchrun"), "train JOB"),
    **dict.fromkeys(("status", "logs", "log", "state", "debug", "explain"), "why RUN"),
    **dict.fromkeys(("eval", "validate", "test"), "evaluate RUN"),
    **dict.fromkeys(("init", "create", "example"), "new digits"),
    **dict.fromkeys(("sbatch", "queue", "schedule"), "submit JOB"),
    **dict.fromkeys(("settings", "show-config"), "config JOB"),
}
"""Verbs of other tools: the verb that was meant, and its argument. To resume is an option of `train`."""
_UNDOTTED_SETTINGS = ("seed",)
_RANK_VARIABLES = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")  # of launchers
_FRAME_TO_SPACES = dict.fromkeys(map(ord, "╭╮╰╯│+"), " ")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_line(_HELP)
        return int(ExitCode.DONE if arguments else ExitCode.REFUSED)
    if arguments[0] == "--version":
        print_line(f"paceline {__version__}")
        return 0
    as_json = "--json" in arguments
    try:
        _check_working_directory()
        return _run_verb(arguments)
    except PacelineError as error:
        return _print_error(error, as_json=as_json)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


def entry() -> None:
    """Run the console script. A rank of another launcher skips torch's destructors, which may wait for lost peers."""
    replace_closed_streams()
    code = main()
    flush()
    if any(name in os.environ for name in _RANK_VARIABLES):
        from paceline.launch.agent.process_exit import end_python, exit_now

        (end_python if code in (ExitCode.DONE, ExitCode.STOPPED) else exit_now)(code)
    sys.exit(code)


def expand_bare_flag(arguments: Sequence[str], flag: str, value: str) -> list[str]:
    """Return the arguments with each `flag` that has no value expanded to `flag=value`."""
    expanded = list(arguments)
    for position in [i for i, word in enumerate(arguments) if word == flag]:
        if position + 1 == len(arguments) or arguments[position + 1].startswith("--"):
            expanded[position] = f"{flag}={value}"
    return expanded


def expand_rank_range(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments with `--ranks 2:4` as `--ranks 4`, and the setting `--survive.min_ranks 2`, if any."""
    expanded, settings = list(arguments), list[str]()
    for position, word in enumerate(arguments):
        value = word.removeprefix("--ranks=") if word.startswith("--ranks=") else word
        is_value = value != word or (position > 0 and arguments[position - 1] == "--ranks")
        match = re.fullmatch(r"(\d+):(\d+)", value) if is_value else None
        if match:
            expanded[position] = word.replace(value, match[2])
            settings = ["--survive.min_ranks", match[1]]
    return expanded, settings


def gather_values(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the arguments with the values of each option in `names`, which takes several, behind one flag.

    The parser would forget `a=1` in `--using a=1 --using b=2`.
    """
    others, gathered = list[str](), dict[str, list[str]]()
    values: list[str] | None = None
    for word in arguments:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            is_one = flag[2:].replace("-", "_") in names
            values = gathered.setdefault(flag, []) if is_one else None
            word = value if is_one else word
            if is_one and not equals:
                continue
        (others if values is None else values).append(word)
    return [*others, *(word for flag, words in gathered.items() for word in (flag, *words))]


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at `--` into those of the verb and the command of another program."""
    words = list(arguments)
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def split_settings(
    arguments: Sequence[str],
    *,
    aliases: Mapping[str, str] = MappingProxyType(_ALIASES),
    undotted: Collection[str] = _UNDOTTED_SETTINGS,
) -> tuple[list[str], list[str]]:
    """Split the arguments into the options of the verb and the settings: `--dotted.name value`, and the undotted."""
    verb_arguments: list[str] = []
    settings: list[str] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        name = aliases.get(name, name)
        word = name + equals + value
        if not (name.startswith("--") and ("." in name or name[2:] in undotted)):
            verb_arguments.append(word)
            continue
        settings.append(word)
        if not equals and remaining and not remaining[0].startswith("--"):
            settings.append(remaining.pop(0))
    return verb_arguments, settings


def _check_working_directory() -> None:
    """Check that the working directory exists: paths, imports and new processes all start there."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the working directory can't be used: {error.strerror}.",
            where=os.environ.get("PWD", ""),
            cause="it was deleted or recreated after the shell entered it",
            hint='cd "$PWD" if it exists again, or cd to another folder',
        ) from None


def _run_verb(arguments: list[str]) -> int:
    from paceline.commands.command_table import VERBS

    verb = arguments[0]
    if verb not in VERBS:
        raise _verb_error(verb, arguments[1:], list(VERBS))
    row = VERBS[verb]
    option_class = row.option_class()
    words, command = split_command(arguments[1:])
    if row.takes_command and not command and not {"-h", "--help"} & set(words):
        line = " ".join(words) or "torchrun --nproc-per-node 2 train.py"
        raise UsageError(f"{verb} needs `--` and the command of a training.", hint=f"paceline {verb} -- {line}")
    aliases = _usable_aliases(option_class, words)
    undotted = _UNDOTTED_SETTINGS if row.takes_settings else ()
    words = expand_bare_flag(words, "--resume", "newest")
    verb_arguments, settings = split_settings(words, aliases=aliases, undotted=undotted)
    if verb == "train":
        verb_arguments, minimum = expand_rank_range(verb_arguments)
        settings += minimum
    if {"-h", "--help"} & set(verb_arguments):
        from paceline.commands.common.help_page import help_page

        page = help_page(verb, option_class, takes_settings=row.takes_settings, takes_command=row.takes_command)
        print_line(page)
        return int(ExitCode.DONE)
    options = _parse_options(verb, option_class, verb_arguments, takes_settings=row.takes_settings)
    if settings and not row.takes_settings:
        raise UsageError(f"{verb} takes no settings, got {settings[0]}.", hint=f"paceline {verb} --help")
    if command and not row.takes_command:
        raise UsageError(f"{verb} takes no command after `--`.", hint=f"paceline {verb} --help")
    code, value, text = resolve(row.run)(options, command if row.takes_command else settings)
    as_json = getattr(options, "json", False)
    if as_json and (value is not None or text):
        print_line(json.dumps(_plain_value(value), indent=1, default=str))
    if text and (not as_json or value is None):
        print_line(text, sys.stderr if code or as_json else sys.stdout)
    return int(code)


def _verb_error(verb: str, words: Sequence[str], verbs: Sequence[str]) -> UsageError:
    """Return the error for a verb that is not there, with the line that was meant if it is another tool's word."""
    what = f"there is no verb {verb!r}."
    line = _OTHER_VERBS.get(verb.lower().replace("_", "-"))
    if line is None:
        return UsageError(what, cause=did_you_mean(verb, verbs), hint=f"paceline {' | '.join(verbs)}")
    own, _, placeholder = line.partition(" ")
    if own != "resume":
        return UsageError(what, hint=f"paceline {own} {shlex.join(words) or placeholder}")
    first, *rest = words or [""]
    is_job = Path(first.partition(":")[0]).suffix == ".py"
    if first and not is_job and Path(first).is_dir():
        from paceline.commands.common.resume_command import missing_job_error

        found = missing_job_error(["--resume", first, *rest])
        return UsageError(what, cause=found.cause, hint=found.hint)
    job, run = (first, []) if is_job else ("JOB", [first] if first else [])
    return UsageError(what, hint=shlex.join(["paceline", "train", job, "--resume", *run, *rest]))


def _usable_aliases(option_class: type, arguments: Sequence[str]) -> dict[str, str]:
    """Return the aliases of options that the verb has; on several nodes, `--ranks` is not the one that is meant."""
    from paceline.nodes.launcher_options import names_nodes

    options = get_type_hints(option_class)
    return {
        alias: own
        for alias, own in _ALIASES.items()
        if own[2:] in options and not (own == "--ranks" and names_nodes(arguments))
    }


def _parse_options(verb: str, cls: type, arguments: list[str], *, takes_settings: bool) -> Any:
    import tyro

    from paceline.commands.common.option_checks import TypedOptions

    option_types = get_type_hints(cls)
    typed = TypedOptions(verb=verb, arguments=arguments, option_types=option_types, takes_settings=takes_settings)
    raise_all(typed.problems())
    arguments = gather_values(arguments, [name for name, kind in option_types.items() if get_origin(kind) is tuple])
    parser_output = io.StringIO()
    try:
        with redirect_stdout(parser_output), redirect_stderr(parser_output):
            return tyro.cli(cls, args=arguments, prog=f"paceline {verb}", config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit:
        from paceline.commands.common.resume_command import missing_job_error

        cause = _unframed_message(parser_output.getvalue())
        if verb == "train" and cause.startswith("Missing") and any(word.startswith("--resume") for word in arguments):
            raise missing_job_error(arguments) from None
        message = (
            f"these arguments can't be parsed: {' '.join(arguments)}" if arguments else f"{verb} needs another argument"
        )
        raise UsageError(f"{message}.", cause=cause, hint=f"paceline {verb} --help") from None


def _unframed_message(framed_text: str) -> str:
    """Return the message that the argument parser has printed, without the box and the title around the message."""
    parts = re.split(r"[─-]{5,}", framed_text.translate(_FRAME_TO_SPACES))
    messages = [" ".join(part.split()) for part in parts[1:]]
    return next((message for message in messages if message), "").removesuffix(".")


def _print_error(error: PacelineError, *, as_json: bool) -> int:
    """Print an error and return its exit code; under another launcher the first failing rank prints for all ranks."""
    from paceline.launch.failures.uncaught_exceptions import failure_sentence, report_failure

    failure, scope = report_failure(error)
    if not scope.prints_all:
        if scope.prints_line:
            print_line(failure_sentence(failure, scope), sys.stderr)
    elif as_json:
        print_line(json.dumps({"exit_code": int(error.exit_code), **error.as_json()}, indent=1))
    else:
        print_line("\n".join(map(shorten_line, f"error: {error}".splitlines())), sys.stderr)
    return int(error.exit_code)


def _plain_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value
