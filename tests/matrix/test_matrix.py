"""Models of every kind under layouts of every kind, each beside one process, in one pool of processes per size.

`make test` runs a covering subset: each kind of layout and each model at least once. `make soak` runs them all and
prints the matrix. A refusal counts as a failure unless docs/refusals.md has it.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.matrix import matrix_page, model_cards
from tests.matrix.matrix_cases import MODELS, Case, layouts

ROOT = Path(__file__).resolve().parents[2]
COVERING = (
    "gpt2:zero1:2", "bert:pp,schedule=zb_h1:2", "digits:zero2:2", "vit:tp:2", "nano:pp,schedule=interleaved:2",
    "digits:pp,schedule=1f1b:2", "llama:cp,remat=full:2", "t5:tp:2", "text:pp=2,dp_shard=2:4", "mixtral:dp_shard=2,ep=2,cp=2:4",
)  # fmt: skip
_EQUAL = ("bitwise", "rounding")


def run(folder: Path, *words: str, seconds: float) -> list[dict[str, Any]]:
    """The answers of a matrix of its own process, since exact mode's kernels are chosen before torch is imported."""
    told = folder / "answers.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.matrix", "--json", str(told), "--log", str(folder / "log")]
    ended = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    print(ended.stdout)
    assert told.exists(), ended.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(told.read_text())
    return found


def wrong(answers: list[dict[str, Any]]) -> list[str]:
    """What is neither equal to one process nor refused with words that stand."""
    known = matrix_page.patterns()
    return [
        f"{one['model']} {one['asked']} ×{one['ranks']}: {one['state']} {one.get('why') or one.get('first_difference')}"
        for one in answers
        if one["state"] not in _EQUAL and not (one["state"] == "refused" and matrix_page.stands(one["why"], known))
    ]


def one_digest(answers: list[dict[str, Any]], what: str, *, models: tuple[str, ...]) -> None:
    """All of a model's answers have the same."""
    for model in models:
        mine = {f"{one['asked']} ×{one['ranks']}": one.get(what) for one in answers if one["model"] == model}
        usual = Counter(mine.values()).most_common(1)[0][0]
        others = {layout: digest for layout, digest in mine.items() if digest != usual}
        assert usual is not None, answers
        assert not others, f"{model}, {what} weights: {others}, and {usual} under the others"


def test_a_covering_subset_is_one_process_training(tmp_path: Path) -> None:
    answers = run(tmp_path, "--checks", "float64", "--case", *COVERING, seconds=400)
    assert len(answers) == len(COVERING)
    assert not wrong(answers)
    assert all(one["state"] in _EQUAL for one in answers), "the subset has no refusals"


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_model_under_every_layout(tmp_path: Path, ranks: int) -> None:
    answers = run(tmp_path, "--ranks", str(ranks), "--seconds", "240", seconds=7200)
    assert len(answers) > 8
    assert not wrong(answers)
    one_digest([one for one in answers if one["state"] in _EQUAL], "start", models=MODELS)


def test_a_refusal_that_the_page_does_not_have_is_wrong() -> None:
    told = {"model": "text", "asked": "tp", "ranks": 2, "state": "refused"}
    assert wrong([{**told, "why": "the moon is full."}])
    assert not wrong([{**told, "why": "GPT has no experts to split."}])
    assert wrong([{**told, "state": "different", "first_difference": {"parameter": "w"}}])
    assert wrong([{**told, "state": "failed", "why": "GPT has no experts to split."}])


def test_cases_travel_as_json() -> None:
    case = Case(model="text", layout="fsdp", ranks=2, params={"dropout": 0.1})
    assert Case.from_json(json.loads(json.dumps(case.as_json()))) == case


@pytest.mark.parametrize("family", MODELS)
def test_a_card_says_of_each_layout_what_was_measured_and_where(family: str) -> None:
    card = yaml.safe_load((ROOT / "docs" / "cards" / f"{family}.yaml").read_text())
    told = [{"state": "refused", "why": row["reason"]} for row in card["layouts"] if row["verdict"] == "refused"]
    assert not matrix_page.unlisted(told)
    assert {row["verdict"] for row in card["layouts"]} <= {*_EQUAL, "refused"}
    assert sum(card["verdicts"].values()) == len(card["layouts"]) == len(list(layouts((2, 4, 8))))
    assert re.fullmatch("[0-9a-f]{40}", card["commit"])
    equal = [row for row in card["layouts"] if row["verdict"] in _EQUAL]
    assert all(row["compared"]["gradients"] > 0 for row in equal)


def test_a_card_is_written_from_the_answers(tmp_path: Path) -> None:
    part = {"compared": {"gradients": 8}, "max_difference": 0.5, "noise_floor": 2.0}
    trained = {**Case(model="text", layout="fsdp", ranks=2).as_json(), "asked": "fsdp", "state": "rounding"}
    refused = {**Case(model="text", layout="ep", ranks=2, micro=2).as_json(), "asked": "ep", "state": "refused"}
    answers = [{**trained, "parts": {"float64": part}}, {**refused, "why": "GPT has no experts to split."}]
    (path,) = model_cards.write(answers, folder=tmp_path)
    card = yaml.safe_load(path.read_text())
    assert card["verdicts"] == {"rounding": 1, "refused": 1}
    assert card["layouts"][0]["difference"] == 0.5
    assert card["layouts"][1]["reason"] == "GPT has no experts to split."
    assert card["layouts"][1]["verify"].endswith("--layout ep --ranks 2 --train.micro_batch_size 2")


def test_a_card_is_not_written_from_files_that_no_commit_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cards, "_git", lambda *_: " M src/paceline/cli.py")
    with pytest.raises(SystemExit, match=r"cli\.py"):
        model_cards.check_committed()
