"""`paceline VERB --help`: grouped options with a description each, an example that parses, and settings that exist."""

import shlex

import pytest

from paceline.cli import main, split_command, split_settings
from paceline.commands.command_table import VERBS
from paceline.commands.common.help_page import EXAMPLES, SETTINGS, help_page
from paceline.config.merge_settings import known_settings


@pytest.mark.parametrize("verb", VERBS)
def test_help_describes_every_option_in_plain_columns(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0 and main([verb, "-h"]) == 0
    out = capsys.readouterr().out
    row = VERBS[verb]
    page = help_page(verb, row.option_class(), takes_settings=row.takes_settings, takes_command=row.takes_command)
    assert out == f"{page}\n" * 2
    assert "{None}" not in page and "default: None" not in page and "default: False" not in page
    assert all(len(line) <= 120 for line in page.splitlines())
    for name in VERBS[verb].option_class().__dataclass_fields__:
        flag = f"--{name.replace('_', '-')}"
        rows = [line for line in page.splitlines() if line.removeprefix("  -v,").strip().startswith(f"{flag} ")]
        positional = name in ("name", "job", "what", "run", "runs", "other")
        assert positional or (len(rows) == 1 and len(rows[0].split(flag)[1]) > 12), f"{flag}: no description"


def test_groups_come_in_one_order() -> None:
    page = help_page("train", VERBS["train"].option_class(), takes_settings=True).splitlines()
    assert page.index("where") < page.index("what") < page.index("check")
    assert any(line.startswith("  -v, --verbose") for line in page[page.index("check") :])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example_of_itself(verb: str) -> None:
    words = shlex.split(EXAMPLES[verb])
    assert words[:2] == ["paceline", verb]
    own, settings = split_settings(split_command(words[2:])[0])
    options = {f"--{name.replace('_', '-')}" for name in VERBS[verb].option_class().__dataclass_fields__}
    assert {word for word in own if word.startswith("--")} <= options
    assert {word[2:] for word in settings if word.startswith("--")} <= set(known_settings())


def test_the_ten_settings_that_help_prints_exist() -> None:
    assert len(SETTINGS) == 10
    assert {name for name in SETTINGS if not name.startswith("job.")} <= set(known_settings())


def test_a_placeholder_is_that_of_its_verb() -> None:
    submit = help_page("submit", VERBS["submit"].option_class(), takes_settings=True)
    assert "  --to SCHEDULER " in submit and "--to FOLDER" not in submit
    assert "  --to FOLDER " in help_page("ckpt", VERBS["ckpt"].option_class(), takes_settings=False)
