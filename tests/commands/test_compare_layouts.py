"""`compare JOB --layouts` gives each layout the same samples and reports what was measured."""

import json

from tests.conftest import Shop

PARAMETERS = 6 * 16 + 16 + 2 * 16 + 16 * 4 + 4


def test_layouts_side_by_side(shop: Shop) -> None:
    done = shop.run(
        "compare", "job.py", "--layouts", "single", "ddp", "threads", "--ranks", "2", "--steps", "4", "--json",
        "--run-dir", "runs/three", "--job.norm", "true",
    )  # fmt: skip
    assert done.code == 0, done.text
    found = {each["layout"]: each for each in done.json()["layouts"]}
    assert list(found) == ["single", "ddp", "threads"]
    assert [each["ranks"] for each in found.values()] == [1, 2, 2]
    assert found["single"]["verdict"] == "reference"
    assert {found["ddp"]["verdict"], found["threads"]["verdict"]} <= {"bitwise", "rounding"}
    assert all(len(each["losses"]) == 5 for each in found.values())  # four that are timed, one that is looked into
    single, ddp = found["single"]["peak_bytes"][0], found["ddp"]["peak_bytes"]
    assert single["parameters"] == ddp[0]["parameters"] == ddp[1]["parameters"] == 4 * PARAMETERS
    assert single["optimizer"] == 8 * PARAMETERS + 4 * 6
    assert found["single"]["sent_bytes"] == [{}]
    assert found["ddp"]["sent_bytes"][0]["all_reduce"] >= 4 * PARAMETERS  # and the vector of totals, and statistics
    plans = [json.loads((shop.path / each["run"] / "plan.json").read_text()) for each in found.values()]
    assert {plan["micro_batch_size"] for plan in plans} == {6}
    page = (shop.path / "compare.html").read_text()
    assert "Memory per rank" in page and "replicas are threads" in page
    assert not list((shop.path / "runs").glob("*/*/checkpoints/step-*"))


CHAIN = """
import torch, torch.nn.functional as F, paceline as pl

def make_job():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    block = lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
    return pl.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), *(block() for _ in range(4)), torch.nn.Linear(16, 2)),
        loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])),
        train_data=torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        global_batch_size=12,
    )
"""


def test_shares_schedules_and_refusals(shop: Shop) -> None:
    shop.write("chain.py", CHAIN)
    done = shop.run(
        "compare", "chain.py", "--layouts", "zero2", "pp", "tp=3", "--ranks", "2", "--steps", "3", "--json",
        "--run-dir", "runs/split", "--train.micro_batch_size", "3",
    )  # fmt: skip
    assert done.code == 0, done.text
    zero2, pp, tp = done.json()["layouts"]
    assert [each["verdict"] for each in (zero2, pp, tp)] == ["reference", pp["verdict"], "refused"]
    assert pp["verdict"] in ("bitwise", "rounding") and "needs 3 ranks" in tp["reason"] and tp["run"] is None
    weights = 4 * (8 * 16 + 16 + 4 * (16 * 16 + 16) + 16 * 2 + 2)
    assert [rank["parameters"] for rank in zero2["peak_bytes"]] == [weights] * 2
    assert sum(rank["gradients"] for rank in zero2["peak_bytes"]) == weights  # rows, which the shares hold
    assert sum(rank["parameters"] for rank in pp["peak_bytes"]) == weights  # each stage's own; the rest is hollow
    assert 0 < pp["bubble"] < 1 and 0 < pp["bubble_planned"] < 1 and zero2["bubble"] is None
    assert pp["sent_bytes"][0]["send"] > 0
    page = (shop.path / "compare.html").read_text()
    assert "1f1b as planned with these times" in page and "1f1b as measured" in page
    assert "paceline verify chain.py --layout pp --ranks 2" in page


def test_a_layout_that_fails_is_a_row(shop: Shop) -> None:
    text = (shop.path / "job.py").read_text()
    shop.write(
        "job.py", text.replace("    time.sleep", "    1 / (os.environ.get('WORLD_SIZE') != '2')\n    time.sleep")
    )
    done = shop.run("compare", "job.py", "--layouts", "single", "ddp", "--ranks", "2", "--steps", "3")
    assert done.code == 1, done.text
    assert "ddp: division by zero" in done.text
    assert [line.split()[:3] for line in done.text.splitlines() if line.startswith(("single ", "ddp "))] == [
        ["single", "1", "reference"],
        ["ddp", "2", "failed"],
    ]


def test_what_is_wrong_is_said_at_once(shop: Shop) -> None:
    done = shop.run("compare", "job.py", "--layouts", "dddp", "single", "single", "--steps", "1", "--job.nope", "1")
    assert done.code == 2
    for said in ("'dddp'", "single twice", "--steps 1", "no parameter 'nope'"):
        assert said in done.text, said
    assert done.text.count("no parameter 'nope'") == 1
    assert not (shop.path / "runs").exists()


def test_a_dry_run_starts_nothing(shop: Shop) -> None:
    done = shop.run("compare", "job.py", "--layouts", "single", "ddp", "--ranks", "2", "--dry-run", "--json")
    assert done.code == 0 and [task["ranks"] for task in done.json()["layouts"]] == [1, 2]
    assert not (shop.path / "runs").exists() and not (shop.path / "compare.html").exists()


def test_words_of_the_other_half_are_refused(shop: Shop) -> None:
    assert "--layouts" in shop.run("compare", "job.py").err
    assert "takes no settings" in shop.run("compare", "a", "b", "--train.steps", "3").err
    assert "one job" in shop.run("compare", "job.py", "job.py", "--layouts", "single", "ddp").err
