"""A schedule survives a round trip through text; an error in the text has its line and column."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.schedule import SCHEDULES, ScheduleError, build, forward_only, parse, read, simulate, write

MINE = """
# keeps one more microbatch than 1F1B
name: mine
rank 0: F0 F1 F2    # warm up
        B0 B1 B2

rank 1: F0 B0 F1 B1
   F2 B2
"""


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(SCHEDULES)), ranks=st.integers(1, 6), micro=st.integers(1, 9))
def test_written_and_read_again_it_is_the_same(name: str, ranks: int, micro: int) -> None:
    program = build(name, ranks=ranks, micro=micro)
    assert parse(write(program)) == program
    forwards = forward_only(rank_of_stage=program.rank_of_stage, micro=micro)
    assert parse(write(forwards)) == forwards


def test_messages_in_places_of_their_own_are_kept() -> None:
    program = build("1f1b", ranks=2, micro=3)
    row = list(program.actions[0])
    place = next(n for n, action in enumerate(row) if action.op.is_send)
    row[place], row[place + 1] = row[place + 1], row[place]  # F1 before the send of F0
    late = replace(program, actions=(tuple(row), program.actions[1]))
    text = write(late)
    assert "SF0.0>1" in text and "RF1.0<0" in text
    assert parse(text) == late != program


def test_a_stage_is_left_out_where_it_is_the_ranks_own() -> None:
    assert write(build("gpipe", ranks=2, micro=2)) == "name: gpipe\nrank 0: F0 F1 B0 B1\nrank 1: F0 F1 B0 B1\n"
    assert "rank 0: F0.0 F3.0" in write(build("zbv", ranks=2, micro=1)).replace("F0.1 ", "")


def test_a_file_with_comments_and_lines_that_go_on(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(MINE)
    program = read(tmp_path / "own.txt")
    assert program.name == "mine" and program.num_micro == 3
    assert simulate(program).peak_activations() == (3, 1)
    (tmp_path / "own.txt").write_text(MINE.replace("name: mine", ""))
    assert read(tmp_path / "own.txt").name == "own"


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("rank 0: F0 X1 B0", "mine:1:12", "'X1' is not an action"),
        (MINE.replace("B1 B2", "B1 B-2"), "mine:5:15", "'B-2' is not an action"),
        ("rank 0: F0 B0\nrank 0: F1 B1", "mine:2:1", "appears twice"),
        ("\n\nrang 0: F0", "mine:3:1", "is not a line of a schedule"),
        ("  F0 B0", "mine:1:1", "continues no line"),
        ("rank 0: F0>1 B0", "mine:1:9", "only a send ends with >RANK"),
        ("rank 0: F0 B0\nrank 1: F1.0 F0.0", "mine:2:14", "is on rank 0"),
        ("rank 0: SF0<1", "mine:1:9", "is not an action"),
    ],
)
def test_what_is_not_understood_has_its_place(text: str, where: str, words: str) -> None:
    with pytest.raises(UsageError) as found:
        parse(text, file="mine")
    assert found.value.where == where and words in found.value.what


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lines for ranks none"),
        ("rank 1: F0 B0", "lines for ranks 1"),
        ("rank 0: F0.0 B0.0\nrank 1: F2.0 B2.0", "no rank computes stage 1"),
        ("rank 0: F0 F2 B0 B2", "no rank computes microbatch 1"),
        ("rank 0: F0 F999999999999 B0", "no rank computes microbatch 1"),
        ("rank 0:\nrank 1:", "no rank computes stage 0"),
    ],
)
def test_what_is_not_there_is_said(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(text)


def test_what_is_understood_is_checked() -> None:
    with pytest.raises(ScheduleError, match=r"B0\.1 is missing"):
        parse("rank 0: F0 F1 B0\nrank 1: F0 F1 B0 B1")
    with pytest.raises(ScheduleError, match="deadlock") as found:
        parse("rank 0: F0 B0 F1 B1\nrank 1: F0 F1 B0 B1", file="mine.txt")
    assert found.value.where == "mine.txt:1:12, rank 0, action 3 of 8: RB0.0<1"
    with pytest.raises(ScheduleError, match=r"B0\.1 comes before F0\.1") as found:
        parse("rank 0: F0 B1\n  B0 F1\nrank 1: F0 F1 B0 B1", file="mine.txt")
    assert found.value.where.startswith("mine.txt:1:12, rank 0")
