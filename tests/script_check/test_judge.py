"""`check` names the fault that was planted in a plain loop of two ranks, and nothing else; sound loops have none."""

from pathlib import Path

import pytest

from paceline.script_check.judge.script_run import read_script_run
from paceline.script_check.judge.verdict import Verdict, judge
from tests.forked_ranks import run_forked
from tests.script_check.planted_loop import PLAIN

pytestmark = pytest.mark.one_worker
SOUND = [
    "a sound loop",
    "accumulation",
    "clipped",
    "a loss scale",
    "autocast",
    "fsdp",
    "fsdp in bfloat16",
    "sharpness-aware",
    "a closure",
]
FAULTS = {
    "the same samples": {"same-samples"},
    "not wrapped": {"gradients-own"},
    "the inner module is called": {"gradients-own"},
    "other start weights": {"gradients-own", "weights-differ"},
    "reduced to the sum": {"gradients-sum"},
    "divided twice": {"gradients-mean-twice"},
    "an ignored parameter": {"parameter-reduced-otherwise"},
    "no_sync at the wrong pass": {"backward-not-reduced"},
    "zero_grad at each pass": {"gradients-discarded"},
    "no zero_grad": {"gradients-stale"},
    "a constant loss": {"gradients-zero"},
    "fsdp without initial values": {"not-initialized"},
    "buffers of each rank": {"buffers-differ"},
    "another learning rate": {"settings-differ"},
    "clipped on one rank": {"gradients-scaled-otherwise"},
    "an old optimizer": {"optimizer-without-gradients"},
    "a part that is trained later": {"parameter-reduced-otherwise"},
}
NOTES = {
    "clipped by value": "clipped-by-value",
    "a fast schedule": "scheduler-steps",
    "shuffled on each rank": "common-samples",
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings of all loops."""
    folder = tmp_path_factory.mktemp("recordings")
    loops = [*SOUND, *FAULTS, *NOTES, *(PLAIN + loop for loop in SOUND)]
    run_forked(
        "tests.script_check.planted_loop", [str(folder), *loops], ranks=2, folder=folder, environ={}, timeout=300
    )
    return folder


def verdict_of(folder: Path) -> Verdict:
    return judge(read_script_run(folder))


def names(verdict: Verdict, *, notes: bool = False) -> set[str]:
    return {finding.name for finding in verdict.findings if finding.is_note == notes}


@pytest.mark.parametrize("loop", FAULTS)
def test_a_planted_fault_is_named_and_nothing_else(recordings: Path, loop: str) -> None:
    verdict = verdict_of(recordings / loop)
    assert names(verdict) == FAULTS[loop] and verdict.exit_code == 4, verdict
    assert names(verdict, notes=True) <= {"batch-norm"}, "what follows from the fault is no news"
    assert all("planted_loop.py:" in finding.line for finding in verdict.findings if finding.step), verdict


@pytest.mark.parametrize("loop", SOUND)
def test_a_sound_loop_has_no_finding_and_the_same_weights(recordings: Path, loop: str) -> None:
    verdict = verdict_of(recordings / loop)
    assert verdict.findings == [] and verdict.exit_code == 0, verdict
    assert any("mean of all ranks' gradients (6 parameters)" in line for line in verdict.sound), verdict
    for rank in range(2):
        digests = {(recordings / name / f"digest-{rank}").read_text() for name in (loop, PLAIN + loop)}
        assert len(digests) == 1


@pytest.mark.parametrize("loop", NOTES)
def test_a_note_does_not_change_the_exit_code(recordings: Path, loop: str) -> None:
    verdict = verdict_of(recordings / loop)
    assert names(verdict, notes=True) == {NOTES[loop]} and names(verdict) == set(), verdict


def test_the_verdict_says_what_the_run_did_not_exercise(recordings: Path) -> None:
    verdict = verdict_of(recordings / "clipped")
    text = " ".join(verdict.not_exercised)
    assert "accumulation" in text and "constant factor" in text and "end of an epoch" in text
    assert "random numbers" not in text and "learning rate" not in text, "the loop has dropout and a schedule"
