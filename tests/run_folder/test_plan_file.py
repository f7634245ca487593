"""plan.json holds the decision and the advice, and neither overwrites the other."""

import json
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.run_folder.plan_file import ADVICE, read_advice, write_advice, write_plan_file

DECIDED = {"layout": "fsdp", "micro_batch_size": 2}
ADVISED = {"case": 2, "recommended": "fsdp", "plans": [{"layout": "fsdp"}], "lines": ["said"]}


@pytest.mark.parametrize("advice_first", [True, False])
def test_neither_half_writes_over_the_other(tmp_path: Path, advice_first: bool) -> None:
    halves = [lambda: write_advice(tmp_path, ADVISED), lambda: write_plan_file(tmp_path, DECIDED)]
    for write in halves if advice_first else reversed(halves):
        write()
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found == {**DECIDED, "case": 2, "recommended": "fsdp", "plans": [{"layout": "fsdp"}]}
    assert set(read_advice(tmp_path)) == set(ADVICE) & set(ADVISED) == set(read_advice(tmp_path / "plan.json"))


def test_what_was_decided_before_does_not_stay(tmp_path: Path) -> None:
    write_plan_file(tmp_path, {"layout": "ddp", "old": 1})
    write_plan_file(tmp_path, DECIDED)
    assert json.loads((tmp_path / "plan.json").read_text()) == DECIDED


@pytest.mark.parametrize(
    ("text", "said"), [(None, "there is no plan"), ("{", "no planned layouts"), ('{"layout": 1}', "no planned layouts")]
)
def test_a_folder_without_advice_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=said) as refused:
        read_advice(tmp_path)
    assert "paceline plan" in refused.value.hint
