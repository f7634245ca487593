"""The text format of schedules: a user's own, or any program written out to be read, edited and read again.

    # one line a rank; what follows # is for people
    name: mine
    rank 0: F0 F1 F2 B0 F3 B1 B2 B3
    rank 1: F0 B0 F1 B1 F2 B2 F3 B3

`F1` is microbatch 1 in the rank's own stage; if a rank has several, `F2.1` is microbatch 1 in stage 2. F, B, I and W
are those of `Op`. A line that begins with a space continues the previous one. Sends and receives are derived; a file
that names any (`SF0.1>1`, `RB0.1<1`) must name all.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.text_file import given_text
from paceline.errors import UsageError
from paceline.schedule.lowering import lower
from paceline.schedule.program import Action, Op, Program
from paceline.schedule.program_check import check
from paceline.schedule.schedule_error import ScheduleError, compute_of
from paceline.schedule.text_timeline import names_stages

_ACTION = re.compile(r"(?P<op>SF|RF|SB|RB|[FBIWU])(?:(?P<stage>\d+)\.)?(?P<micro>\d+)(?:(?P<way>[<>])(?P<peer>\d+))?")
_LINE = re.compile(r"(?P<key>name|rank\s+(?P<rank>\d+))\s*:(?P<rest>.*)", re.I | re.S)


@dataclass(frozen=True, kw_only=True)
class _Word:
    text: str
    line: int
    column: int


def parse(text: str, *, file: str = "schedule", name: str = "") -> Program:
    """Return the checked program of a text; `file` is its name in errors.

    Raises:
        UsageError: a line cannot be parsed; the error has its number and column.
        ScheduleError: the program is incomplete, out of order, or deadlocks.
    """
    rows: dict[int, list[_Word]] = {}
    found = name
    for number, line in _logical_lines(text, file):
        match = _LINE.match(line)
        if match is None:
            raise _error(
                file, _Word(text=line.split("\n")[0].strip(), line=number, column=1), "is not a line of a schedule"
            )
        if match["rank"] is None:
            found = match["rest"].strip()
        elif int(match["rank"]) in rows:
            raise _error(file, _Word(text=match["key"], line=number, column=1), "appears twice")
        else:
            rows[int(match["rank"])] = list(_words(match["rest"], line=number, before=match.start("rest")))
    program = _program(rows, file=file, name=found or "own")
    try:
        return check(program)
    except ScheduleError as error:
        row, words = program.actions[error.fault.rank], rows[error.fault.rank]
        place = error.fault.place if len(row) == len(words) else compute_of(row, place=error.fault.place)
        if place < len(words):
            error.where = f"{file}:{words[place].line}:{words[place].column}, {error.where}"
        raise


def read(path: Path | str) -> Program:
    """Read a file with `parse`; its stem is the schedule's name if the text gives none."""
    text = given_text(Path(path), what="a schedule", hint="rank 0: F0 F1 B0 B1, one line per rank: docs/schedules.md")
    return parse(text, file=str(path), name=Path(path).stem)


def write(program: Program) -> str:
    """Return the text that `parse` reads as this program; messages are written only if they differ from the derived."""
    orders = [program.computes(rank) for rank in range(program.num_ranks)]
    derived = lower(orders, name=program.name, rank_of_stage=program.rank_of_stage, num_micro=program.num_micro)
    rows: Sequence[Sequence[Action]] = orders if derived == program else program.actions
    short = not names_stages(orders) and program.rank_of_stage == tuple(range(program.num_ranks)) and rows is orders
    lines = [f"name: {program.name}"]
    for rank, row in enumerate(rows):
        words = [f"{a.op}{a.microbatch}" if short else str(a) for a in row]
        lines.append(f"rank {rank}: {' '.join(words)}")
    return "\n".join(lines) + "\n"


def _logical_lines(text: str, file: str) -> Iterator[tuple[int, str]]:
    """Yield lines without comments, joined with their continuation lines (by newlines, to keep columns right)."""
    start, held = 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#")[0].rstrip()
        if line[:1].isspace() and line.strip():
            if not held:
                raise _error(file, _Word(text=line.strip(), line=number, column=1), "continues no line")
            held += "\n" * (number - start - held.count("\n")) + line
        elif line:
            if held:
                yield start, held
            start, held = number, line
    if held:
        yield start, held


def _words(rest: str, *, line: int, before: int) -> Iterator[_Word]:
    for down, part in enumerate(rest.split("\n")):
        for match in re.finditer(r"\S+", part):
            yield _Word(text=match[0], line=line + down, column=match.start() + 1 + (0 if down else before))


def _program(rows: dict[int, list[_Word]], *, file: str, name: str) -> Program:
    if sorted(rows) != list(range(len(rows))) or not rows:
        raise UsageError(
            f"{file} has lines for ranks {', '.join(map(str, sorted(rows))) or 'none'}.",
            cause="ranks are counted from 0, one line each",
            hint="rank 0: F0 B0",
        )
    parsed = [[(word, _action(word, rank=rank, file=file)) for word in rows[rank]] for rank in range(len(rows))]
    owner = _owners(parsed, file=file)
    used = {action.microbatch for row in parsed for _, action in row}
    if (gap := _gap(used)) is not None:
        raise UsageError(
            f"{file}: no rank computes microbatch {gap}.",
            cause="microbatches are counted from 0",
            hint=f"F{gap} and B{gap} on every line",
        )
    num_micro = len(used)
    orders = [[action for _, action in row] for row in parsed]
    program = lower(orders, name=name, rank_of_stage=owner, num_micro=num_micro)
    if any(not action.op.is_compute for row in orders for action in row):
        return Program(
            name=name,
            num_ranks=len(orders),
            num_stages=len(owner),
            num_micro=num_micro,
            rank_of_stage=owner,
            actions=tuple(tuple(row) for row in orders),
        )
    return program


def _action(word: _Word, *, rank: int, file: str) -> Action:
    match = _ACTION.fullmatch(word.text)
    if match is None:
        raise _error(file, word, "is not an action")
    op = Op(match["op"])
    if op.is_compute == bool(match["way"]) or (match["way"] is not None and (match["way"] == ">") != op.is_send):
        raise _error(file, word, "is not an action: a send says >RANK, a receive <RANK, a compute neither")
    stage = rank if match["stage"] is None else int(match["stage"])
    peer = None if match["peer"] is None else int(match["peer"])
    return Action(op=op, stage=stage, microbatch=int(match["micro"]), peer=peer)


def _owners(parsed: list[list[tuple[_Word, Action]]], *, file: str) -> tuple[int, ...]:
    """Return the rank of each stage, which is the rank that computes in it."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(parsed):
        for word, action in row:
            if owner.setdefault(action.stage, rank) != rank:
                raise _error(file, word, f"is in stage {action.stage}, which is on rank {owner[action.stage]}")
    if (gap := _gap(owner)) is not None or not owner:
        raise UsageError(
            f"{file}: no rank computes stage {gap or 0}.", cause="stages are counted from 0", hint="rank 0: F0 B0"
        )
    return tuple(owner[stage] for stage in range(len(owner)))


def _gap(numbers: Iterable[int]) -> int | None:
    """Return the first missing number below the highest, or None."""
    have = set(numbers)
    return next((n for n in range(len(have)) if n not in have), None)


def _error(file: str, word: _Word, what: str) -> UsageError:
    return UsageError(
        f"{word.text!r} {what}.",
        where=f"{file}:{word.line}:{word.column}",
        hint="actions are F0 B0 (or I0 and W0) of the rank's own stage, F2.0 of stage 2: `rank 0: F0 F1 B0 B1`",
    )
