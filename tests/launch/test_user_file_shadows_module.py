"""A user's file with the name of a module that the launcher imports is not run."""

import sys
from pathlib import Path

import pytest

from tests.conftest import Ended, Shop

WORKS = "print('helpers are here')\ndef escape(text, quote=True):\n    return text\n"


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is imported before is on trial."""
    monkeypatch.delenv("PACELINE_FORKSERVER_COMMAND", raising=False)


def train(shop: Shop) -> Ended:
    """By the command as it is installed: `python -m` would find the file itself."""
    own = str(Path(sys.executable).with_name("paceline"))
    return shop.call([own, "train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "2"])


@pytest.mark.parametrize("text", [WORKS, "raise SystemExit('usage: html.py FILE')\n"])
def test_such_a_file_in_the_working_folder_is_not_run(shop: Shop, text: str) -> None:
    shop.write("html.py", text)
    ended = train(shop)
    assert ended.code == 0, ended.text
    assert "helpers are here" not in (shop.path / "run" / "logs" / "attempt-1" / "forkserver.log").read_text()
