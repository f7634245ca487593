"""`survive.grace`: the run says whether a stop leaves enough time to save, and saves once at the start to find out."""

import pytest

from paceline.events import CheckpointSaved, Event, Note
from paceline.trainer.saving.grace_period import GracePeriodSink
from tests.conftest import Shop
from tests.reporting.test_event_delivery import step


def saved(seconds: float) -> CheckpointSaved:
    return CheckpointSaved(step=10, path="step-10", seconds=seconds, num_bytes=1)


def notes_after(*seconds: float, grace: float = 10.0) -> list[tuple[str, str]]:
    notes: list[Event] = []
    sink = GracePeriodSink(grace, emit=notes.append)
    sink.handle(step(1, step_seconds=2.0))
    for number in seconds:
        sink.handle(saved(number))
    return [(note.level, note.text) for note in notes if isinstance(note, Note)]


def test_the_first_save_is_compared_with_the_grace_period() -> None:
    ((level, text),) = notes_after(3.0, 3.5)
    assert level == "info"
    assert text == "a step takes 2.0 s and a save 3.0 s, and the grace period is 10.0 s (survive.grace)"


def test_a_save_that_is_too_slow_is_warned_of_once_also_later() -> None:
    first, second = notes_after(3.0, 8.1, 9.0)
    assert first[0] == "info" and second[0] == "warning"
    assert "a save 8.1 s, but the grace period is 10.0 s" in second[1] and "killed before it has saved" in second[1]
    ((level, _),) = notes_after(8.1)
    assert level == "warning"


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_new_run_with_a_grace_period_saves_after_its_first_step(shop: Shop, background: str) -> None:
    words = ("--survive.grace", "30", "--checkpoint.every", "8", "--checkpoint.keep", "9", "--eval.every", "100")
    words = (*words, "--checkpoint.background", background)
    ended = shop.train("run", *words)
    assert ended.code == 0 and "the grace period is 30.0 s (survive.grace)" in ended.out, ended.text
    saved = sorted(path.name for path in (shop.path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000001", "step-00000008", "step-00000012"]
    again = shop.train("run", *words, steps=14)
    assert again.code == 0 and not (shop.path / "run" / "checkpoints" / "step-00000013").exists(), again.text


def test_without_a_grace_period_nothing_changes(shop: Shop) -> None:
    ended = shop.train("run", "--checkpoint.every", "8", "--eval.every", "100")
    assert ended.code == 0 and "survive.grace" not in ended.out
    assert not (shop.path / "run" / "checkpoints" / "step-00000001").exists()
