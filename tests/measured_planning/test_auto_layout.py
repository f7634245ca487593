"""`--layout auto`, from the command to the report, with real processes that run out of memory."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from paceline.config.task import Task
from paceline.launch.failures.failure_record import Failure
from paceline.measured_planning.auto_layout import next_fallback_task
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.profiling.machine_benchmarks.benchmark_cache import cache_folder, machine_fingerprint, store_benchmark
from paceline.reporting.run_report import run_page
from paceline.run_folder.run_folder import RunFolder
from tests.conftest import Ended, Shop
from tests.profiling.test_benchmark_results import probe

ROOM, LESS = "130", "125"  # MiB beside what a rank has when it begins; a microbatch of 32 needs 140 to 200


@pytest.fixture
def auto(shop: Shop) -> Shop:
    """A shop with a job that can be short of memory, on a machine that has been probed."""
    shop.write("job.py", (Path(__file__).parent / "memory_limited_job.py").read_text())
    rates = tuple(replace(one, streams={**one.streams, "copy": one.streams["add"]}) for one in probe().rates)
    store_benchmark(probe(rates=rates, fingerprint=machine_fingerprint(ranks=2, device="cpu")), environ=environ(shop))
    return shop


def environ(shop: Shop, *, is_short: bool = False) -> dict[str, str]:
    """Where memory is short, freed memory is not kept, as under a `ulimit` from the start: it would be room beside."""
    return {"XDG_CACHE_HOME": str(shop.path / "cache"), **({"MALLOC_PERTURB_": "0"} if is_short else {})}


def train(shop: Shop, *words: str, steps: int = 2) -> Ended:
    own = ("--ranks", "2", "--run-dir", "run", "--train.steps", str(steps), "--watch.to", "console,jsonl")
    return shop.run("train", "job.py", *own, *words, environ=environ(shop, is_short="--job.room" in words))


def events(shop: Shop, kind: str) -> list[dict[str, Any]]:
    lines = (shop.path / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_it_says_what_it_chose_and_is_held_against_it(auto: Shop) -> None:
    small = ("--layout", "auto", "--job.length", "8", "--job.depth", "2")
    done = train(auto, *small, steps=3)
    assert done.code == 0, done.text
    lines = done.out.splitlines()
    begins = ["auto: --layout ", "why: ", "second: "]
    assert all(line.startswith(word) for line, word in zip(lines, begins, strict=False)), lines[:4]
    assert "planned in" in lines[1] and "step time is an estimate" in lines[1] and lines[3].startswith("starting ")
    chosen = json.loads((auto.path / "run" / "plan.json").read_text())
    assert chosen["auto"] == lines[:3] and f"--layout {chosen['forecast']['layout']} " in lines[0]
    (told,) = events(auto, "Foretold")
    assert told["source"] == "auto" and told["step"] == 3 and told["peak_bytes"] == chosen["forecast"]["peak_bytes"]
    assert told["measured_seconds"] == pytest.approx(told["time_ratio"] * told["step_seconds"])
    assert told["measured_bytes"] > 0 and told["memory_ratio"] is None
    assert sum(line.startswith("forecast | ") for line in lines) == 1
    metrics = (auto.path / "run" / "metrics.jsonl").read_text()
    assert '"forecast/time_ratio": ' in metrics and "forecast/memory_ratio" not in metrics
    assert "Forecast and measured" in run_page(RunFolder(auto.path / "run"))
    again = train(auto, *small, steps=4)
    assert again.code == 0 and f"{lines[0].partition(', on ')[0]}, as in this run so far" in again.out
    assert "planned in" not in again.out and len(events(auto, "Foretold")) == 2


def test_short_of_memory_it_goes_on_with_a_layout_that_needs_less(auto: Shop) -> None:
    done = train(auto, "--layout", "auto", "--job.room", ROOM)
    assert done.code == 0, done.text
    falls = [line for line in done.err.splitlines() if "auto: continuing from the first step" in line]
    assert falls and "out of memory in " in falls[0] and " at step " in falls[0]
    started = events(auto, "RunStarted")
    chosen = json.loads((auto.path / "run" / "plan.json").read_text())
    first = json.loads((auto.path / "run" / "auto" / "auto.json").read_text())["rungs"][0]
    assert len(started) == len(falls) + 1 and chosen["forecast"]["peak_bytes"] < 0.86 * first["peak_bytes"]
    assert chosen["micro_batch_size"] == int(chosen["forecast"]["settings"]["train.micro_batch_size"]) < 32


def test_where_nothing_may_change_it_says_what_would_need_less(auto: Shop) -> None:
    """The line that it says is then typed."""
    failed = train(auto, "--layout", "ddp", "--job.room", LESS)
    assert failed.code == 1, failed.text
    text = failed.err[failed.err.index("FAILED") :]
    assert "FAILED at step 1. First error: rank " in text and "OutOfMemory: out of memory in forward" in text
    assert "this process's data (ulimit) is limited to" in text and "Traceback" not in failed.text
    for part in ("parameters: ", "gradients: ", "optimizer: ", "activations: ", "rest: "):
        assert f"    {part}" in text
    assert "  1. micro_batch_size 32 -> " in text and "% time (" in text and "  3. " in text
    assert len(text.splitlines()) <= 24
    (line,) = [line for line in text.splitlines() if line.startswith("Resume: ")]
    words = shlex.split(line.removeprefix("Resume: paceline "))
    assert int(words[words.index("--train.micro_batch_size") + 1]) < 32
    again = auto.run(*words, environ=environ(auto, is_short=True))
    assert again.code == 0, again.text
    assert "forecast | " not in again.out and not events(auto, "Foretold"), "nothing was planned"


def test_an_allocation_that_no_layout_explains_brings_no_other_layout(auto: Shop) -> None:
    job = (auto.path / "job.py").read_text()
    auto.write(
        "job.py",
        job.replace(
            "        return x + F",
            "        os.environ.get('RANK') == '1' and torch.empty(1 << 46)\n        return x + F",
        ),
    )
    failed = train(auto, "--layout", "ddp")
    assert (
        failed.code == 1 and "No other layout is suggested, because this allocation alone (262144.0 GiB)" in failed.err
    ), failed.text
    resume = failed.err.split("Resume: ")[1]
    assert "The cheapest changes" not in failed.err and "micro_batch_size" not in resume and "--layout tp" not in resume


@pytest.mark.soak
def test_when_nothing_needs_less_the_run_fails_and_says_so(auto: Shop) -> None:
    failed = train(auto, "--layout", "auto", "--job.room", "1", "--job.depth", "1", "--train.micro_batch_size", "32")
    assert failed.code == 1 and "FAILED at step 1. First error: rank " in failed.err, failed.text
    assert "out of memory in " in failed.err and "Resume: paceline train" in failed.err


@pytest.mark.soak
def test_a_script_falls_back_as_the_command_does(auto: Shop) -> None:
    auto.write(
        "script.py",
        "import paceline as pl\nfrom job import make_job\n"
        f"with pl.Run(make_job(room={ROOM}), layout='auto', ranks=2, run_dir='run', settings={{'train.steps': 1,\n"
        "            'watch.to': 'console,jsonl'}) as run:\n"
        "    for batch in run.batches():\n        run.step(batch)\n",
    )
    done = auto.call([*auto.command()[:1], "-W", "ignore", "script.py"], environ=environ(auto, is_short=True))
    assert done.code == 0, done.text
    assert "second: " in done.out and "auto: continuing" in done.err and len(events(auto, "RunStarted")) >= 2


BROKEN = """
import torch, paceline as pl

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 30:
            raise OSError("file 30 is broken")
        return torch.ones(8), torch.ones(8)

job = pl.Job(
    model=lambda: torch.nn.Linear(8, 8),
    loss=lambda output, batch: ((output - batch[1]).square().sum(), output.numel()),
    train_data=Data(),
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    global_batch_size=16,
)
"""


@pytest.mark.parametrize(
    "words", ["plan job.py --cluster here --ranks 2 --seconds 2", "train job.py --ranks 2 --layout auto"]
)
def test_data_that_can_not_be_read_is_no_word_about_layouts(auto: Shop, words: str) -> None:
    """One rank alone meets it, or the plan before them."""
    auto.write("job.py", BROKEN)
    failed = auto.run(*words.split(), environ=environ(auto))
    assert failed.code == 1 and "DataError: reading sample 30 failed: OSError: file 30 is broken" in failed.err, (
        failed.text
    )
    assert "job.py:9" in failed.err and "layout of" not in failed.err and "Connection closed" not in failed.err


PICKY = """
import torch, paceline as pl

class Picky(torch.nn.Linear):
    def forward(self, x):
        if len(x) == 4 and x.sum().item() == 32:
            raise ValueError("not four samples, please")
        return super().forward(x)

job = pl.Job(
    model=lambda: Picky(8, 8),
    loss=lambda output, batch: ((output - batch[1]).square().sum(), output.numel()),
    train_data=torch.utils.data.TensorDataset(torch.ones(64, 8), torch.ones(64, 8)),
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    global_batch_size=8,
)
"""


def test_ranks_that_all_refuse_a_size_that_is_timed_go_on_without_it(auto: Shop) -> None:
    auto.write("job.py", PICKY)
    words = ("plan", "job.py", "--cluster", "here", "--ranks", "2", "--seconds", "2", "--run-dir", "run")
    planned = auto.run(*words, environ=environ(auto))
    assert planned.code == 0, planned.text
    advice = json.loads((auto.path / "run" / "answer-plan.json").read_text())
    assert "ValueError: not four samples" in advice["facts"]["refused"]["micro_batch_size=4"]
    sizes = {one["settings"]["train.micro_batch_size"] for one in advice["timed"]}
    assert "ValueError: not four samples, please" in planned.out
    assert not {"dp_replicate", "zero1", "fsdp"} & {*advice["facts"]["refused"]}
    assert sizes and "4" not in sizes and advice["recommended"] != ""


@pytest.mark.soak
def test_a_plan_that_was_made_is_what_later_runs_are_held_against(auto: Shop) -> None:
    small = ("--job.length", "8", "--job.depth", "1")
    planned = auto.run("plan", "job.py", "--ranks", "2", *small, environ=environ(auto))
    assert planned.code == 0, planned.text
    assert [file.name[:5] for file in cache_folder(environ=environ(auto)).iterdir() if file.name[:4] == "plan"] == [
        "plan-"
    ]
    assert train(auto, "--layout", "fsdp", *small).code == 0
    (told,) = events(auto, "Foretold")
    assert told["layout"] == "fsdp" and told["parts"]["parameters"] > 0
    (file,) = auto.path.glob("runs/**/answer-plan.json")
    advice = json.loads(file.read_text())
    timed = {(one["layout"], one["settings"]["train.micro_batch_size"]): one["step_seconds"] for one in advice["timed"]}
    micro = json.loads((auto.path / "run" / "plan.json").read_text())["micro_batch_size"]
    assert told["source"] == ("timed" if ("fsdp", str(micro)) in timed else "plan")
    row = advice["plans"][0]
    best = (row["layout"], row["settings"], pytest.approx(row["step_seconds"]))
    assert row["timed"]["seconds"] == best[-1]
    typed = [word for name, value in row["settings"].items() for word in (f"--{name}", value)]
    assert train(auto, "--layout", row["layout"], *typed, *small, "--run-dir", "named").code == 0
    lines = map(json.loads, (auto.path / "named" / "events.jsonl").read_text().splitlines())
    (told,) = (event for event in lines if event["event"] == "Foretold")
    assert told["source"] == "timed" and told["step_seconds"] == best[-1]
    for more in ((), ("--train.check_every", "7")):
        chosen = train(auto, "--layout", "auto", *small, "--run-dir", "chosen", *more)
        assert chosen.code == 0 and "paceline plan timed its steps here" in chosen.out, chosen.text
        own = json.loads((auto.path / "chosen" / "plan.json").read_text())["forecast"]
        assert (own["layout"], own["settings"], own["step_seconds"]) == best and own["source"] == "timed"
        rmtree(auto.path / "chosen")
    estimate = train(auto, "--layout", "auto", *small, "--run-dir", "estimate", "--data.workers", "1")
    assert estimate.code == 0 and "timed its steps" not in estimate.out, "steps that read data otherwise were not timed"
    other = ("--run-dir", "other", "--job.length", "8", "--job.depth", "2")
    assert "forecast" not in train(auto, "--layout", "fsdp", *other).out


@pytest.mark.parametrize(("requested", "falls"), [(None, True), (900, True), (1 << 40, False)])
def test_a_fallback_is_no_answer_to_an_allocation_above_the_forecast(
    tmp_path: Path, requested: int | None, falls: bool
) -> None:
    rung = LayoutForecast(
        layout="fsdp", family="fsdp", ranks=2, settings={}, peak_bytes=500, parts={}, step_seconds=1.0
    )
    first = replace(rung, layout="ddp", peak_bytes=1000)
    options = {"forecast": first.as_json(), "rungs": [rung.as_json()]}
    task = Task(verb="train", job="job.py", layout="ddp", ranks=2, run=str(tmp_path), options=options)
    said = {"error": "OutOfMemory", "requested_bytes": requested}
    found = next_fallback_task(task, Failure(rank=1, kind="OutOfMemory", message="out of memory", said=said))
    assert (found is not None) == falls and (found is None or found.layout == "fsdp")
