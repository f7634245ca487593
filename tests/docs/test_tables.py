"""What the pages list is what the code has: settings with their defaults, errors, exit codes, causes."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline as pl
from paceline.config.merge_settings import default_value, known_settings, range_text
from paceline.config.resume_allowances import COMPARED_SETTINGS, FREE_SETTINGS, REPORTED_SETTINGS
from paceline.errors import ExitCode
from paceline.verification.diagnosis.hypotheses import GradientFacts, list_hypotheses
from tests.docs.page import ROOT

DOCS = ROOT / "docs"
ROWS = re.compile(r"^\| (?P<first>.*?) \| ?(?P<rest>.*) \|$", re.M)
DERIVED = {"train.epochs", "run_dir", "eval.every", "eval.batch_size", "checkpoint.every"}


def rows(page: str) -> dict[str, list[str]]:
    """The tables of a page: the first cell, and the others."""
    text = (DOCS / page).read_text()
    return {m["first"]: [c.strip() for c in m["rest"].split(" | ")] for m in ROWS.finditer(text)}


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_every_setting_stands_there_with_its_default() -> None:
    listed = {name.strip("`"): cells for name, cells in rows("settings.md").items() if name.startswith("`")}
    settings = {name: cells for name, cells in listed.items() if not name.startswith("--")}
    assert set(settings) == set(known_settings())
    for name, (default, *_) in settings.items():
        value = default_value(name)
        if value is not None and value != ():
            assert default == shown(value), f"{name}: the page says {default!r}, the default is {shown(value)!r}"
        else:
            assert not re.fullmatch(r"\d+|true|false", default), f"{name} has no default, the page says {default!r}"


def test_every_setting_stands_there_with_its_range() -> None:
    lines = [line.strip("| ").split("|") for line in (DOCS / "settings.md").read_text().splitlines() if "`" in line]
    listed = {cells[0].strip(" `"): cells[2].strip() for cells in lines if len(cells) == 4}
    assert {name: listed.get(name) for name in known_settings()} == {
        name: range_text(name) for name in known_settings()
    }


def test_what_a_resume_does_with_each_setting_stands_in_its_table() -> None:
    listed = [set(re.findall(r"`([a-z_.]+)`", first)) for first in rows("checkpoints.md") if "`train." in first]
    compared, told, free = (names for names in listed if len(names) > 3)
    assert compared == set(COMPARED_SETTINGS)
    assert told - {"make_job"} == set(REPORTED_SETTINGS)
    groups = {name for name in free if name.endswith(".")}
    assert {name for name in FREE_SETTINGS if not name.startswith(tuple(groups))} == free - groups


def test_every_number_has_a_range_or_may_be_any() -> None:
    numbers = [
        name for name, kind in known_settings().items() if not range_text(name) and kind in (int, float, int | None)
    ]
    assert numbers == ["seed"]


def test_every_option_of_a_verb_is_known() -> None:
    from paceline.commands.command_table import TrainOptions

    listed = {re.split(r"[ `]", name.strip("`"))[0] for name in rows("settings.md") if name.startswith("`--")}
    fields = {f"--{name.replace('_', '-')}" for name in TrainOptions.__dataclass_fields__ if name != "job"}
    assert listed == fields


def test_every_error_class_and_exit_code_is_explained() -> None:
    text = (DOCS / "errors.md").read_text()
    classes = [name for name in dir(pl) if name.endswith("Error") and name != "PacelineError"]
    assert [name for name in classes if f"`{name}`" not in text] == []
    table = rows("errors.md")
    assert [code for code in ExitCode if str(int(code)) not in table] == []


@pytest.mark.parametrize("cause", [c[0] for c in rows("verify-details.md").values() if c and c[0].startswith("`")])
def test_causes_in_the_page_are_causes_that_verify_gives(cause: str) -> None:
    found = set()
    for ranks, counts in ((2, [3, 5]), (2, [3.0, 5, 2, 6, 1, 4, 2, 3])):
        facts = GradientFacts(counts=np.asarray(counts, dtype=np.float64), ranks=ranks, samples=40)
        found |= {_plain(guess.cause) for guess in list_hypotheses(facts)}
    texts = [
        Path(ROOT / "src/paceline/verification" / name).read_text()
        for name in ("diagnosis/gradient_cause.py", "compare_independent_runs.py")
    ]
    source = _plain(" ".join(re.findall(r'"([^"]*)"', " ".join(texts))))
    words = _plain(cause.strip("`"))
    pieces = [piece.strip() for piece in re.split(r"[#:;,()]|clipped", words) if len(piece.strip()) > 9]
    known = any(all(piece in other for piece in pieces) for other in [*found, source])
    assert pieces and known, cause


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\{[^}]*\}|\d+(?:\.\d+)?", "#", text))
