"""Two recordings of a loop, of two ranks and of one process that is fed: the same training, or what differs and why."""

from pathlib import Path

import pytest

from paceline.script_check.comparison.script_comparison import ScriptComparison, compare_scripts
from tests.forked_ranks import run_forked
from tests.script_check.paired_loop import UNRECORDED

pytestmark = pytest.mark.one_worker
SAME = [
    "a data loader",
    "the loss in the model",
    "accumulation",
    "accumulation in one alone",
    "clipped",
    "autocast",
    "fsdp",
    "an even end",
]
DIFFERENT = {
    "a loss times the ranks": "are 2 times those of one, the 2 ranks: a sum in place of a mean, or a loss multiplied",
    "accumulation not divided": "the 2 backward passes of a step: the loss is not divided by them",
    "a scaled learning rate": "lr of parameter group 0 is 0.01 in one, and 0.02 in many, 2 times as much",
    "another weight decay": "weight_decay of parameter group 0 is 0.1 in one, and 0.05 in many",
    "a mean of means": "in one, and equally in many: a mean of means",
    "batch norm": "batch norms, as norm, use the statistics of their rank's own samples",
    "batches of the same size": "the batches of many are 2 times as large",
    "a filled end": "filled with samples that come again, as DistributedSampler does without drop_last",
}
NOT_COMPARABLE = {
    "dropout": "draws random numbers in its forward",
    "another start": "the weights differ before the first step",
    "the targets are outside, without a loader": "its loss is computed outside, on other targets",
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings of all loops."""
    folder = tmp_path_factory.mktemp("pairs")
    loops = [*SAME, *DIFFERENT, *NOT_COMPARABLE]
    run_forked("tests.script_check.paired_loop", [str(folder), *loops], ranks=2, folder=folder, environ={}, timeout=300)
    return folder


def compared(folder: Path) -> ScriptComparison:
    comparison = compare_scripts(folder / "one", folder / "many")
    turned = compare_scripts(folder / "many", folder / "one")
    assert turned == comparison, "the order of the recordings does not matter"
    return comparison


@pytest.mark.parametrize("loop", SAME)
def test_the_same_training_is_called_the_same(recordings: Path, loop: str) -> None:
    comparison = compared(recordings / loop)
    assert (comparison.verdict, comparison.exit_code) == ("same", 0), comparison.text
    assert comparison.samples == "the same at each step" and comparison.findings == ()


@pytest.mark.parametrize("loop", UNRECORDED)
def test_keeping_batches_changes_no_weight(recordings: Path, loop: str) -> None:
    for rank in range(2):
        digests = {(recordings / loop / f"digest-{name}-{rank}").read_text() for name in ("many", "plain")}
        assert len(digests) == 1


@pytest.mark.parametrize("loop", DIFFERENT)
def test_another_training_is_told_with_its_cause(recordings: Path, loop: str) -> None:
    comparison = compared(recordings / loop)
    assert (comparison.verdict, comparison.exit_code) == ("different", 4), comparison.text
    assert DIFFERENT[loop] in comparison.cause, comparison.text


@pytest.mark.parametrize("loop", NOT_COMPARABLE)
def test_what_cannot_be_compared_says_why(recordings: Path, loop: str) -> None:
    comparison = compared(recordings / loop)
    assert (comparison.verdict, comparison.exit_code) == ("can't be compared", 5), comparison.text
    assert NOT_COMPARABLE[loop] in comparison.cause and comparison.hint, comparison.text
