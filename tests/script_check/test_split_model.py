"""Models that a script splits over ranks by hand: sound ones raise no alarm, and faults are found by one of the verbs."""

from pathlib import Path

import pytest

from paceline.script_check.comparison.script_comparison import ScriptComparison, compare_scripts
from paceline.script_check.judge.script_run import read_script_run
from paceline.script_check.judge.verdict import Verdict, judge
from tests.forked_ranks import run_forked

pytestmark = pytest.mark.one_worker
SOUND = {
    "columns": "3 parameters in 2 pieces, 3 on all ranks alike, 2 constant at the start",
    "columns: clipped": "3 parameters in 2 pieces",
    "columns: the same dropout": "3 parameters in 2 pieces",
    "stages": "2 parameters in 2 pieces, 1 on all ranks alike",
    "experts": "1 parameter in 2 pieces, 3 on all ranks alike",
    "sequences": "each rank steps with the mean of all ranks' gradients (5 parameters)",
}
CHECKED = {
    "columns: not added": ("replicas-part", "embed"),
    "columns: clipped alone": ("gradients-scaled-otherwise", "by the norm of its own parts"),
    "columns: equal shards": ("equal-shards", "the shards of all ranks were drawn with one seed"),
    "columns: other samples": ("replicas-part", "are replicas on ranks 0, 1, and differ after the step"),
    "stages: a tied embedding alone": ("replicas-part", "embed"),
}
COMPARED = {
    "columns: a bias on each rank": "compute another forward or another loss",
    "columns: a divided bias": "the gradients of bias are 0.5 times those of one, 1/2: divided by the ranks once more",
    "columns: replicas in the norm": "Each of the 4 replicated parameters counts once for each rank",
    "columns: left out of the norm": "It leaves out sink",
    "columns: dropout of each rank": "rank 1 of many draws other random numbers in its forward than rank 0",
    "experts: experts not divided": "the gradients of experts are 2 times those of one, the 2 ranks",
    "experts: a gather without gradient": "the gradients of embed differ, and those of experts, head, router are equal",
    "sequences: local counts": "in one, and equally in many: a mean of means",
    "sequences: positions from zero": "compute another forward or another loss than one",
    "sequences: a gather without gradient": "those of head are equal",
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings of all loops."""
    folder = tmp_path_factory.mktemp("splits")
    loops = [*SOUND, *CHECKED, *COMPARED]
    run_forked("tests.script_check.split_loop", [str(folder), *loops], ranks=2, folder=folder, environ={}, timeout=300)
    return folder


def verdict_of(folder: Path) -> Verdict:
    return judge(read_script_run(folder / "many"))


def compared(folder: Path) -> ScriptComparison:
    return compare_scripts(folder / "one", folder / "many")


@pytest.mark.parametrize("loop", SOUND)
def test_a_sound_split_raises_no_alarm_and_is_the_same_training(recordings: Path, loop: str) -> None:
    verdict = verdict_of(recordings / loop)
    assert (verdict.exit_code, verdict.findings) == (0, []), verdict
    assert any(SOUND[loop] in line for line in verdict.sound), verdict
    comparison = compared(recordings / loop)
    assert (comparison.verdict, comparison.exit_code) == ("same", 0), comparison.text


@pytest.mark.parametrize("loop", CHECKED)
def test_one_run_shows_replicas_that_part(recordings: Path, loop: str) -> None:
    name, text = CHECKED[loop]
    verdict = verdict_of(recordings / loop)
    assert [finding.name for finding in verdict.findings if not finding.is_note] == [name], verdict
    assert text in verdict.findings[0].text and verdict.exit_code == 4, verdict
    assert compared(recordings / loop).exit_code == 4


@pytest.mark.parametrize("loop", COMPARED)
def test_the_comparison_with_one_process_shows_what_one_run_does_not(recordings: Path, loop: str) -> None:
    verdict = verdict_of(recordings / loop)
    assert verdict.exit_code == 0, verdict
    comparison = compared(recordings / loop)
    assert (comparison.verdict, comparison.exit_code) == ("different", 4), comparison.text
    assert COMPARED[loop] in comparison.cause, comparison.text


def test_pieces_are_found_in_rows_columns_and_later_layers(recordings: Path) -> None:
    pieces = {
        loop: {(each.rank, each.name): each.own_name for each in step.ranks[0].pieces}
        for loop in ("columns", "stages")
        for step in read_script_run(recordings / loop / "one").start
    }
    assert len(pieces["columns"]) == 16 and pieces["columns"][1, "pair_bias"] == "pair_bias"
    assert pieces["stages"][1, "layers.0.weight"] == "layers.2.weight"
    assert pieces["stages"][1, "layers.1.norm"] == "layers.3.norm", "a constant weight, from its neighbour"
