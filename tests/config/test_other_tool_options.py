"""Options of other tools are refused with the line to type, and the command accepts that line."""

import pytest

from paceline.cli import main
from paceline.commands.command_table import TrainOptions
from paceline.config.merge_settings import known_settings
from paceline.config.other_tool_options import OTHER_TOOL_OPTIONS, find_equivalent


@pytest.mark.parametrize("name", OTHER_TOOL_OPTIONS)
def test_what_is_to_be_typed_is_there(name: str) -> None:
    words = OTHER_TOOL_OPTIONS[name].replacement.split()
    if not words[0].startswith("--"):
        return  # another command, or nothing
    own, known = words[0][2:], known_settings()
    assert own in known or own.startswith("job.") or own.replace("-", "_") in TrainOptions.__dataclass_fields__


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("--epochs", "3"), "--train.epochs 3"),
        (("--epoch", "3"), "--train.epochs 3"),
        (("--num_train_epochs=3",), "--train.epochs 3"),
        (("--batch-size", "32"), "--train.global_batch_size 32"),
        (("--per-device-train-batch-size", "4"), "--train.micro_batch_size 4"),
        (("--lr", "0.1"), "--job.lr 0.1"),
        (("--bf16",), "--train.precision bf16"),
        (("--nnodes", "2"), "--nodes 2:HOST"),
        (("--local-rank=0",), "leave --local-rank out"),
        (("--gpus", "8"), "--ranks 8"),
        (("--tensor-parallel-size", "2"), "--layout tp=2"),
        (("--staleness", "4"), "--update ps,staleness=4"),
    ],
)
def test_an_option_of_another_tool(typed: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.py", *typed]) == 2
    assert f"to do: {expected}" in capsys.readouterr().err


def test_all_of_them_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.py", "--epochs", "3", "--wibble", "1", "--batch-size", "8"]) == 2
    told = capsys.readouterr().err
    assert "1. train has no option --epochs" in told and "3. train has no option --batch-size" in told


def test_what_nobody_has_is_none() -> None:
    assert find_equivalent("--wibble", "3") is None


def test_an_option_that_is_a_number_says_so_of_each_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.py", "--ranks", "two", "--wibble", "1"]) == 2
    told = capsys.readouterr().err
    assert "--ranks two: expected an integer." in told and "no option --wibble" in told and "tyro" not in told
    assert main(["verify", "job.py", "--ranks=2", "--steps=1.5"]) == 2
    assert "--steps 1.5: expected an integer." in capsys.readouterr().err
    assert main(["plan", "job.py", "--seconds", "soon"]) == 2
    assert "--seconds soon: expected a number." in capsys.readouterr().err
