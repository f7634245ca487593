"""Weights that differ between ranks are never saved as a valid checkpoint."""

import pytest

from tests.conftest import SMALL_JOB, Shop

SCHEDULE = "torch.optim.lr_scheduler.StepLR(o, 5, 0.9)"
APART = "torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 - 0.1 * (e >= {start}) * int(os.environ.get('RANK', 0)))"


@pytest.mark.parametrize(("start", "found", "saved"), [(0, 1, []), (5, 8, ["step-00000004"])])
def test_weights_that_part_are_found_at_the_first_step_and_before_a_save(
    shop: Shop, start: int, found: int, saved: list[str]
) -> None:
    shop.write("job.py", SMALL_JOB.replace(SCHEDULE, APART.format(start=start)))
    ended = shop.train("run", "--checkpoint.every", "4", steps=11)
    assert ended.code == 1 and f"at step {found} the replicas are no longer equal: first.weight" in ended.text, (
        ended.text
    )
    assert sorted(path.name for path in (shop.path / "run").glob("checkpoints/step-*")) == saved


def test_weights_that_part_are_found_at_the_end(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB.replace(SCHEDULE, APART.format(start=5)))
    ended = shop.train("run", "--checkpoint.every", "100", steps=9)
    assert ended.code == 1 and "at step 9 the replicas are no longer equal" in ended.text, ended.text
    assert shop.train("never", "--train.check_every", "0", steps=9).code == 0


@pytest.mark.parametrize(
    ("change", "trains", "says"),
    [
        ("ema=0.5 + 0.2 * int(os.environ.get('RANK', 0)),", 1, "the average (ema) of first.weight differs on rank 1"),
        ("ema=_still(0.7),", 0, "the weights agree but their average does not"),
        pytest.param("ema=0.7,", 0, '"averages": 6', marks=pytest.mark.soak),
    ],
    ids=["a rank's own decay", "an average that stands still", "sound"],
)
def test_an_average_is_compared_as_the_weights_are(shop: Shop, change: str, trains: int, says: str) -> None:
    still = "from paceline.step.optimizer_update import Ema\ndef _still(decay):\n    Ema.update = lambda self: None\n    return decay\n"
    shop.write("job.py", still + SMALL_JOB.replace("        max_grad_norm=1.0,\n", f"        {change}\n"))
    found = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert found.code == (0 if says.startswith('"') else 4) and says in found.text, found.text
    ended = shop.train("run", steps=3)
    assert ended.code == trains and (says in ended.text) == bool(trains), ended.text
