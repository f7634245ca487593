"""`check` names the fault that was planted in a plain loop of two ranks, and nothing else; sound loops have none."""

from pathlib import Path

import pytest

from paceline.script_check.judge.script_run import read_script_run
from paceline.script_check.judge.verdict import Verdict, judge
from tests.forked_ranks import run_forked
from tests.script_check.planted_loop import PLAIN, SPARSE

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
    "a parameter without a gradient",
    "an evaluation with gradients",
    "a saliency map on one rank",
    "clipped per parameter",
    "workers that split the samples",
    "flat parameters",
    "flat parameters, seen as original ones",
    "flat parameters, gathered once",
    "flat parameters without shards",
    "main gradients",
    "copies in float32",
    SPARSE + "accumulation",
    SPARSE + "a loss scale",
]
FAULTS = {
    "the same samples": {"same-samples"},
    "not wrapped": {"gradients-own"},
    "sent from one rank": {"gradients-own"},
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
    "eval mode on one rank": {"modes-differ"},
    "workers that read the same": {"workers-read-the-same"},
    "clipped at each pass": {"passes-unequal"},
    "one rank clips per parameter": {"gradients-scaled-otherwise"},
    "two models, one without a wrapper": {"gradients-own"},
    "alone with the same samples": {"same-samples"},
    "alone at another scale": {"gradients-own"},
    "not finite": {"not-finite"},
    "another loss scale": {"gradients-scaled-otherwise"},
    "flat parameters, one ignored": {"parameter-reduced-otherwise"},
    "flat parameters of each rank": {"gradients-own"},
    "main gradients that are not reduced": {"gradients-own"},
    "copies in float32 of each rank": {"gradients-own"},
    SPARSE + "no zero_grad": {"gradients-stale"},
    SPARSE + "clipped on one rank": {"gradients-scaled-otherwise"},
    SPARSE + "no_sync at the wrong pass": {"backward-not-reduced"},
    SPARSE + "zero_grad at each pass": {"gradients-discarded"},
    SPARSE + "an old optimizer": {"optimizer-without-gradients"},
    SPARSE + "a part that does not learn": {"not-trained"},
}
NOTES = {
    "clipped by value": "clipped-by-value",
    "compressed": "reduction-unexplained",
    "local SGD": "gradients-own",
    "a fast schedule": "scheduler-steps",
    "shuffled on each rank": "common-samples",
    "the same random numbers": "same-random-numbers",
    "never in training mode": "eval-mode",
    "unequal batches": "unequal-counts",
    "normalized per parameter": "factors-by-parameter",
    "clipped while scaled": "clipped-while-scaled",
    "a part of all weights on each rank": "weights-differ",
    "averaged by hand with buffers": "buffers-differ",
    "flat parameters, clipped by shard": "reduction-unexplained",
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings of all loops."""
    folder = tmp_path_factory.mktemp("recordings")
    plain = dict.fromkeys(PLAIN + loop.removeprefix(SPARSE) for loop in SOUND)
    loops = [*SOUND, *FAULTS, *NOTES, "split by hand", "two models", *plain]
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
        loops = (loop, PLAIN + loop.removeprefix(SPARSE))
        digests = {(recordings / name / f"digest-{rank}").read_text() for name in loops}
        assert len(digests) == 1


@pytest.mark.parametrize("loop", NOTES)
def test_a_note_does_not_change_the_exit_code(recordings: Path, loop: str) -> None:
    verdict = verdict_of(recordings / loop)
    assert names(verdict, notes=True) - {"batch-norm"} == {NOTES[loop]} and names(verdict) == set(), verdict


def test_a_finding_about_one_of_two_optimizers_names_it_and_its_own_lines(recordings: Path) -> None:
    assert verdict_of(recordings / "two models").findings == []
    (finding,) = verdict_of(recordings / "two models, one without a wrapper").findings
    assert finding.text.startswith("optimizer of_generator (Adam): each rank steps with its own gradient"), finding
    source = (Path(__file__).parent / "planted_loop.py").read_text().splitlines()
    assert source[int(finding.line.partition(":")[2]) - 1].endswith("# the generator's"), finding
    assert finding.hint.startswith("wrap the model"), finding


def test_gradients_that_are_clipped_per_parameter_are_a_mean(recordings: Path) -> None:
    text = " ".join(verdict_of(recordings / "clipped per parameter").sound)
    assert "clipped per parameter or group, by 0." in text and "to 1, alike on all ranks" in text


def test_a_known_cause_is_named(recordings: Path) -> None:
    (scaled,) = verdict_of(recordings / "another loss scale").findings
    assert "GradScalers of ranks 0 and 1 have different scales, 65536 and 32768" in scaled.text, scaled
    assert "factors (1.53e-05, 3.05e-05)" in scaled.text and "init_scale" in scaled.hint, scaled
    (clipped,) = verdict_of(recordings / "flat parameters, clipped by shard").findings
    assert "model.clip_grad_norm_()" in clipped.hint and "the mean, multiplied by" in clipped.text, clipped


def test_the_parts_of_flat_parameters_have_the_names_and_weights_of_the_model(recordings: Path) -> None:
    plain = read_script_run(recordings / "a sound loop")
    for loop in ("flat parameters", "flat parameters, seen as original ones", "flat parameters without shards"):
        run = read_script_run(recordings / loop)
        own = {name: each.digest for name, each in run.start[0].weights[0].items()}
        assert own == {name: each.digest for name, each in plain.start[0].weights[0].items()}, loop


def test_only_some_steps_have_summaries_and_the_verdict_says_so(recordings: Path) -> None:
    run = read_script_run(recordings / f"{SPARSE}clipped on one rank")
    assert [step.number for step in run.steps if step.has_prints] == [1, 2, 3, 6]
    verdict = judge(run)
    assert verdict.not_exercised[0].startswith("gradients and weights at 4 of 8 steps"), verdict


def test_a_model_that_is_split_by_hand_has_replicas_that_stay_equal(recordings: Path) -> None:
    verdict = verdict_of(recordings / "split by hand")
    assert (verdict.exit_code, names(verdict)) == (4, {"replicas-part"}), verdict
    assert "first.bias, first.weight, are replicas on ranks 0, 1, and differ" in verdict.findings[0].text, verdict


def test_equal_gradients_of_all_ranks_show_no_reduction(recordings: Path) -> None:
    verdict = verdict_of(recordings / "alone with the same samples")
    assert not any("mean of all ranks" in line for line in verdict.sound), verdict
    assert any("all ranks computed the same gradients" in line for line in verdict.not_exercised), verdict


def test_the_verdict_says_what_the_run_did_not_exercise(recordings: Path) -> None:
    verdict = verdict_of(recordings / "clipped")
    text = " ".join(verdict.not_exercised)
    assert "accumulation" in text and "constant factor" in text
    assert "a second epoch: no sample came again; without a call of the sampler's set_epoch()" in text
    assert "random numbers" not in text and "learning rate" not in text, "the loop has dropout and a schedule"
