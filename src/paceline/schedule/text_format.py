"""Read and write schedules as text, for custom schedules and for inspecting any program.

    # one line per rank; text after # is a comment
    name: mine
    rank 0: F0 F1 F2 B0 F3 B1 B2 B3
    rank 1: F0 B0 F1 B1 F2 B2 F3 B3

The letters are those of `Op`. `F1` is the forward of microbatch 1 in the rank's stage. If a rank has several stages,
`F2.1` is the forward of microbatch 1 in stage 2. A line that begins with a space continues the previous one. Sends and
receives are derived. But a file that has any of them (`SF0.1>1`, `RB0.1<1`) must have all.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.text_file import read_user_text
from paceline.errors import UsageError
from paceline.schedule.lowering import lower
from paceline.schedule.program import Action, Op, Program
from paceline.schedule.program_check import check
from paceline.schedule.schedule_error import ScheduleError, find_compute_index
from paceline.schedule.text_timeline import needs_stage_labels

_ACTION = re.compile(r"(?P<op>SF|RF|SB|RB|[FBIWU])(?:(?P<stage>\d+)\.)?(?P<micro>\d+)(?:(?P<arrow>[<>])(?P<peer>\d+))?")
_LINE = re.compile(r"(?P<key>name|rank\s+(?P<rank>\d+))\s*:(?P<rest>.*)", re.I | re.S)


@dataclass(frozen=True, kw_only=True)
class _Word:
    """A word of the text. Its line and column are counted from 1."""

    text: str
    line: int
    column: int


def parse(text: str, *, file: str = "schedule", name: str = "") -> Program:
    """Return the checked program of a text. `file` is the name of the text in errors.

    `name` is the schedule's name if the text has none.

    Raises:
        UsageError: a line can't be parsed. The error has its line number and column.
        ScheduleError: the program is incomplete, out of order, or deadlocks.
    """
    rows: dict[int, list[_Word]] = {}
    program_name = name
    for number, line in _logical_lines(text, file):
        match = _LINE.match(line)
        if match is None:
            raise _parse_error(
                file, _Word(text=line.split("\n")[0].strip(), line=number, column=1), "is not a line of a schedule"
            )
        if match["rank"] is None:
            program_name = match["rest"].strip()
        elif int(match["rank"]) in rows:
            raise _parse_error(file, _Word(text=match["key"], line=number, column=1), "appears twice")
        else:
            rows[int(match["rank"])] = list(_parse_words(match["rest"], line=number, start_column=match.start("rest")))
    program = _build_program(rows, file=file, name=program_name or "own")
    try:
        return check(program)
    except ScheduleError as error:
        row, words = program.actions[error.fault.rank], rows[error.fault.rank]
        index = (
            error.fault.position if len(row) == len(words) else find_compute_index(row, position=error.fault.position)
        )
        if index < len(words):
            error.where = f"{file}:{words[index].line}:{words[index].column}, {error.where}"
        raise


def read(path: Path | str) -> Program:
    """Read a file with `parse`. If the text has no name, the schedule is named after the file, without its suffix."""
    text = read_user_text(
        Path(path), expected="a schedule", hint="rank 0: F0 F1 B0 B1, one line per rank: docs/schedules.md"
    )
    return parse(text, file=str(path), name=Path(path).stem)


def write(program: Program) -> str:
    """Return the text of a program for `parse`. It has messages only if they differ from the derived ones."""
    orders = [program.compute_actions(rank) for rank in range(program.num_ranks)]
    derived = lower(orders, name=program.name, rank_of_stage=program.rank_of_stage, num_micro=program.num_micro)
    rows: Sequence[Sequence[Action]] = orders if derived == program else program.actions
    can_omit_stages = (
        not needs_stage_labels(orders) and program.rank_of_stage == tuple(range(program.num_ranks)) and rows is orders
    )
    lines = [f"name: {program.name}"]
    for rank, row in enumerate(rows):
        words = [f"{a.op}{a.microbatch}" if can_omit_stages else str(a) for a in row]
        lines.append(f"rank {rank}: {' '.join(words)}")
    return "\n".join(lines) + "\n"


def _logical_lines(text: str, file: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each line with its continuation lines, without comments.

    The parts of the text are joined by as many newlines as in the file, so that lines and columns stay correct.
    """
    start, pending = 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#")[0].rstrip()
        if line[:1].isspace() and line.strip():
            if not pending:
                raise _parse_error(
                    file, _Word(text=line.strip(), line=number, column=1), "is indented, but continues no line"
                )
            pending += "\n" * (number - start - pending.count("\n")) + line
        elif line:
            if pending:
                yield start, pending
            start, pending = number, line
    if pending:
        yield start, pending


def _parse_words(text: str, *, line: int, start_column: int) -> Iterator[_Word]:
    for line_offset, line_text in enumerate(text.split("\n")):
        for match in re.finditer(r"\S+", line_text):
            yield _Word(
                text=match[0], line=line + line_offset, column=match.start() + 1 + (0 if line_offset else start_column)
            )


def _build_program(rows: dict[int, list[_Word]], *, file: str, name: str) -> Program:
    if sorted(rows) != list(range(len(rows))) or not rows:
        raise UsageError(
            f"{file} has lines for ranks {', '.join(map(str, sorted(rows))) or 'none'}.",
            cause="ranks are counted from 0, one line each",
            hint="rank 0: F0 B0",
        )
    parsed = [[(word, _parse_action(word, rank=rank, file=file)) for word in rows[rank]] for rank in range(len(rows))]
    rank_of_stage = _find_rank_of_stage(parsed, file=file)
    microbatches = {action.microbatch for row in parsed for _, action in row}
    if (missing := _first_missing(microbatches)) is not None:
        raise UsageError(
            f"{file}: no rank computes microbatch {missing}.",
            cause="microbatches are counted from 0",
            hint=f"F{missing} and B{missing} on every line",
        )
    num_micro = len(microbatches)
    orders = [[action for _, action in row] for row in parsed]
    program = lower(orders, name=name, rank_of_stage=rank_of_stage, num_micro=num_micro)
    if any(not action.op.is_compute for row in orders for action in row):
        return Program(
            name=name,
            num_ranks=len(orders),
            num_stages=len(rank_of_stage),
            num_micro=num_micro,
            rank_of_stage=rank_of_stage,
            actions=tuple(tuple(row) for row in orders),
        )
    return program


def _parse_action(word: _Word, *, rank: int, file: str) -> Action:
    match = _ACTION.fullmatch(word.text)
    if match is None:
        raise _parse_error(file, word, "is not an action")
    op = Op(match["op"])
    if op.is_compute == bool(match["arrow"]) or (match["arrow"] is not None and (match["arrow"] == ">") != op.is_send):
        raise _parse_error(file, word, "is not an action: only a send ends with >RANK, only a receive with <RANK")
    stage = rank if match["stage"] is None else int(match["stage"])
    peer = None if match["peer"] is None else int(match["peer"])
    return Action(op=op, stage=stage, microbatch=int(match["micro"]), peer=peer)


def _find_rank_of_stage(parsed: list[list[tuple[_Word, Action]]], *, file: str) -> tuple[int, ...]:
    """Return the rank of each stage: the rank whose line has the actions of the stage."""
    rank_of_stage: dict[int, int] = {}
    for rank, row in enumerate(parsed):
        for word, action in row:
            if rank_of_stage.setdefault(action.stage, rank) != rank:
                raise _parse_error(
                    file, word, f"is in stage {action.stage}, which is on rank {rank_of_stage[action.stage]}"
                )
    if (missing := _first_missing(rank_of_stage)) is not None or not rank_of_stage:
        raise UsageError(
            f"{file}: no rank computes stage {missing or 0}.", cause="stages are counted from 0", hint="rank 0: F0 B0"
        )
    return tuple(rank_of_stage[stage] for stage in range(len(rank_of_stage)))


def _first_missing(numbers: Iterable[int]) -> int | None:
    """Return the first missing number below the largest one, or None."""
    present = set(numbers)
    return next((n for n in range(len(present)) if n not in present), None)


def _parse_error(file: str, word: _Word, problem: str) -> UsageError:
    return UsageError(
        f"{word.text!r} {problem}.",
        where=f"{file}:{word.line}:{word.column}",
        hint="actions are F0 B0 (or I0 and W0) of the rank's own stage, F2.0 of stage 2: `rank 0: F0 F1 B0 B1`",
    )
