"""The report shows what its run folder holds: settings and origins, failures, resizes, torn lines, the verdict."""

import hashlib
import json
import math
import os
import re
import subprocess
import time
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.compare import compare
from paceline.events import EvalDone, Event, Restarted, RunEnded, RunStarted, StepDone, as_dict
from paceline.filesystem.run_lock import lock_run_folder
from paceline.launch.failures.failure_record import write_failure
from paceline.launch.several_nodes.node_stays import NodeStay, NodeStays
from paceline.profiling.environment import code_facts, loaded_modules
from paceline.reporting.failures import attempt_lines, show_failures
from paceline.reporting.nodes_section import show_nodes
from paceline.reporting.run_history import ResumeMark, read_history
from paceline.reporting.run_report import run_page, run_status, write_report
from paceline.reporting.sinks.jsonl import JsonlSink
from paceline.reporting.svg.charts import Curve, draw_chart
from paceline.reporting.svg.downsampling import is_noisy, mean_columns, running_mean, value_band
from paceline.run_folder.run_folder import RunFolder


def step(number: int, **other: Any) -> StepDone:
    given: dict[str, Any] = {
        "step": number, "epoch": 0.1, "samples": number * 64, "loss": 3.0 / number, "lr": 3e-4, "step_seconds": 0.1,
        "compute_seconds": 0.06, "communication_seconds": 0.02, "data_seconds": 0.01, "samples_per_second": 640.0,
    }  # fmt: skip
    return StepDone(**{**given, **other})


def started(ranks: int, **other: Any) -> RunStarted:
    return RunStarted(run_id="r", job="job.py", layout="ddp", ranks=ranks, **other)


def record(run: RunFolder, *events: Event) -> None:
    sink = JsonlSink(run)
    for event in events:
        sink.handle(event)
    sink.close()


def write(run: RunFolder, **files: Any) -> None:
    for name, value in files.items():
        (run.path / f"{name.replace('_', '-')}.json").write_text(json.dumps(value))


# curves: nothing is drawn that was not logged


def test_a_band_holds_every_value_and_a_mean_is_of_its_neighbours() -> None:
    points = [(float(n), math.sin(n * 12.9898) * 43758.5453 % 1.0) for n in range(1, 2001)]
    assert is_noisy(points)
    edges = value_band(points)
    assert min(low for _, low, _ in edges) == min(y for _, y in points)
    assert max(high for _, _, high in edges) == max(y for _, y in points)
    means = running_mean(points, window=5)
    assert means[0][1] == sum(y for _, y in points[:3]) / 3
    assert means[100][1] == sum(y for _, y in points[98:103]) / 5
    assert [x for x, _ in means] == [x for x, _ in points]


def test_a_curve_that_goes_somewhere_is_drawn_as_it_is() -> None:
    assert not is_noisy([(float(n), 5.0 / n) for n in range(1, 500)])
    assert not is_noisy([(float(n), float(n % 2)) for n in range(10)])


def test_a_gap_stays_a_gap() -> None:
    means = running_mean([(1.0, 1.0), (2.0, math.nan), (3.0, 3.0)], window=3)
    assert means[0] == (1.0, 1.0)
    assert math.isnan(means[1][1])


def test_columns_keep_the_whole() -> None:
    rows = [(float(n), [float(n), 2.0]) for n in range(1, 101)]
    drawn = mean_columns(rows, max_columns=7)
    assert len(drawn) <= 7
    assert drawn[0][0] == 1 and drawn[-1][1] == 100
    sizes = [last - first + 1 for first, last, _ in drawn]
    total = sum(size * parts[0] for size, (_, _, parts) in zip(sizes, drawn, strict=True))
    assert total == pytest.approx(5050, rel=1e-12)  # sums of a hundred floats


def test_loss_terms_have_axes_of_their_own(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, *(step(n, terms={"token": 3.0 / n, "balance": 0.001 / n}) for n in range(1, 9)))
    text = run_page(run)
    for name in (
        "loss",
        "loss/token",
        "loss/balance",
        "samples seen",
        "time per step, ms",
        "peak memory of a rank, GiB",
    ):
        assert text.count(f'aria-label="{name}"') == 1


# attempts


def test_steps_an_attempt_went_back_over_are_gone_even_where_they_are_not_logged_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, started(2), *(step(n, loss=float(n)) for n in (1, 10, 15, 19)))
    record(run, started(3, resumed_from=10), *(step(n, loss=float(-n)) for n in (12, 20)))
    history = read_history(run)
    assert history.points("loss") == [(1, 1.0), (10, 10.0), (12, -12.0), (20, -20.0)]
    assert [s for s, _ in history.samples()] == [1, 10, 12, 20]
    assert history.num_discarded == 2
    assert [(mark.step, mark.text) for mark in history.resume_marks()] == [(10, "2→3 ranks")]
    assert "2→3 ranks" in run_page(run)


def test_a_run_that_began_anew_in_its_folder_forgets_the_first_try(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, started(2), step(1), step(2), started(2), step(1, loss=7.0))
    assert read_history(run).points("loss") == [(1, 7.0)]


@pytest.mark.parametrize(("torn", "said"), [(1, "1 line of metrics.jsonl"), (3, "3 lines of metrics.jsonl")])
def test_torn_lines_are_said(tmp_path: Path, torn: int, said: str) -> None:
    run = RunFolder(tmp_path)
    record(run, step(1), step(2))
    assert "Unreadable" not in run_page(run)
    with run.metrics.open("a") as file:
        file.write("\n".join(['{"step": 3, "lo'] * torn))
    assert said in run_page(run)


def test_failures_name_the_first_rank_its_exception_and_the_users_line(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    folder = run.attempt_folder(1)
    folder.mkdir(parents=True)
    (tmp_path / "data.py").write_text("def get(i):\n    return [][i]  # <the line>\n")
    scope: dict[str, Any] = {}
    exec(compile((tmp_path / "data.py").read_text(), str(tmp_path / "data.py"), "exec"), scope)
    with pytest.raises(IndexError) as caught:
        scope["get"](4)
    write_failure(folder, rank=2, error=caught.value, step=41)
    write_failure(folder, rank=0, error=RuntimeError("connection <closed> by peer"), step=41)
    text = run_page(run)
    assert "Attempt 1 at step 41: rank 2" in text
    assert "IndexError: list index out of range" in text
    assert "&lt;the line&gt;" in text
    assert "data.py:2" in text
    assert text.index("rank 2") < text.index("connection &lt;closed&gt; by peer")


def test_a_killed_rank_is_named_before_the_peers_who_could_still_write(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    folder = run.attempt_folder(1)
    folder.mkdir(parents=True)
    write_failure(folder, rank=0, error=RuntimeError("connection closed by peer"))
    killed = {"rank": 1, "kind": "signal", "message": "SIGKILL", "step": 120}
    (folder / "first-failure.json").write_text(json.dumps(killed))
    text = run_page(run)
    assert "Attempt 1 at step 120: rank 1</strong>, killed by SIGKILL" in text


# settings


def test_what_was_set_comes_first_with_its_origin_and_secrets_are_hidden(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, step(1))
    (tmp_path / "config.toml").write_text(
        'log.every = 10  # file run.toml\ntrain.precision = "bf16"  # command line\njob.api_key = "hush"  # command line\n'
        'job.tokens = "77"  # file a # b.toml\n'
    )
    text = run_page(run)
    set_rows, _, rest = text.partition("settings at their default")
    assert "<td>train.precision</td><td>bf16</td><td>fp32</td><td>command line</td>" in set_rows
    assert "<td>log.every</td><td>10</td>" in rest
    assert "hush" not in text
    assert "<td>job.tokens</td><td>77" in set_rows


def test_the_environment_has_the_jobs_commit_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from paceline.profiling.environment import environment

    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "DATABASE_URL"):
        monkeypatch.setenv(name, "hush-hush")
    for name in list(os.environ):
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    job = tmp_path / "job.py"
    job.write_text("job = None\n")
    assert environment(str(job))["job"]["git_commit"] is None

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@example.org", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "job.py")
    git("commit", "-qm", "one")
    facts = environment(str(job))
    digest = hashlib.sha256(job.read_bytes()).hexdigest()
    head = git("rev-parse", "HEAD")
    assert {name: facts["job"][name] for name in ("file", "digest", "git_commit", "git_dirty")} == {
        "file": "job.py",
        "digest": digest,
        "git_commit": head,
        "git_dirty": False,
    }
    job.write_text("job = 1\n")
    assert environment(f"{job}:job")["job"]["git_dirty"] is True
    assert {"host", "cpu", "torch_build", "python", "packages"} <= set(facts)
    assert "hush-hush" not in json.dumps(facts)


# verify's verdict

ANSWER = {
    "verdict": "rounding", "layout": "ddp", "update": "sync", "ranks": 2, "first_difference": None,
    "rungs": [{"name": "free running", "verdict": "rounding", "max_difference": 1e-9, "noise_floor": 1e-8}],
    "about": {"digest": "d" * 64, "settings": {"train.steps": "3", "job.lr": "0.1", "log.every": "1"}},
}  # fmt: skip
TASK = {"layout": "ddp", "update": "sync", "ranks": 2, "settings": {"job.lr": "0.1", "train.precision": "fp32"}}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"settings": {"job.lr": "0.1", "train.steps": "900", "checkpoint.keep": "1"}}, None),
        ({"ranks": 3}, "ranks (3 here, 2 there)"),
        ({"layout": "single"}, "layout (single here, ddp there)"),
        ({"settings": {"job.lr": "0.2"}}, "job.lr (0.2 here, 0.1 there)"),
        ({"settings": {"job.lr": "0.1", "train.precision": "bf16"}}, "train.precision (bf16 here, unset there)"),
        ({"digest": "e" * 64}, "job file (eeeeeeeeeeee here, dddddddddddd there)"),
    ],
)
def test_a_verdict_is_shown_only_for_the_same_job_settings_and_ranks(
    tmp_path: Path, changed: dict[str, Any], named: str | None
) -> None:
    run = RunFolder(tmp_path)
    record(run, step(1))
    task = {**TASK, **changed}
    write(run, task=task, env={"job": {"digest": task.pop("digest", "d" * 64)}}, answer_verify=ANSWER)
    text = run_page(run)
    assert ("verify: rounding" in text) is (named is None)
    assert named is None or named in text


def test_the_verdict_is_shown_with_what_it_says_nothing_about(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, step(1))
    write(run, task=TASK, env={"job": {"digest": "d" * 64}}, answer_verify={**ANSWER, "not_exercised": ["a <b>: c"]})
    text = run_page(run)
    assert "Not exercised, so the verdict says nothing about it:</p><ul><li>a &lt;b&gt;: c</li></ul></section>" in text
    assert "verify: rounding</span> <small>1 thing not exercised</small>" in text and "Not covered" not in text
    rungs = [{**rung, "left_out": "the <weights>"} for rung in ANSWER["rungs"] * 2]  # type: ignore[operator]
    write(run, answer_verify={**ANSWER, "rungs": rungs})
    assert run_page(run).count("<p>Not covered: the &lt;weights&gt;.</p>") == 1
    for gaps in ([], None, "a"):
        write(run, answer_verify={**ANSWER, "not_exercised": gaps})
        assert "verify: rounding" in run_page(run) and "ot exercised" not in run_page(run)


def test_the_answer_of_a_verify_beside_the_run_is_found(tmp_path: Path) -> None:
    run, other = RunFolder(tmp_path / "job" / "one"), RunFolder(tmp_path / "job" / "two")
    for folder in (run, other):
        folder.path.mkdir(parents=True)
    record(run, step(1))
    write(run, task=TASK, env={"job": {"digest": "d" * 64}})
    write(other, answer_verify=ANSWER)
    assert "verify: rounding" in run_page(run)
    write(other, answer_verify={**ANSWER, "ranks": 5})
    assert "verify:" not in run_page(run)


CODE = {"digest": "d" * 64, "modules": {"job": "1" * 64, "model": "2" * 64}, "torch_build": "2.13", "device": "cpu",
        "packages": {"numpy": "2.0"}}  # fmt: skip


def answer(**about: Any) -> dict[str, Any]:
    return {**ANSWER, "about": {**ANSWER["about"], **CODE, **about}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("about", "env", "named"),
    [
        ({}, {}, None),
        ({"modules": {"job": "1" * 64, "model": "3" * 64}}, {}, "module model (222222222222 here, 333333333333 there)"),
        ({"modules": {"job": "1" * 64}}, {}, "module model (222222222222 here, unset there)"),
        ({"modules": {**CODE["modules"], "only_verify": "4" * 64}}, {}, None),  # type: ignore[dict-item]
        ({"modules": {**CODE["modules"], "late": "5" * 64}}, {"late_modules": {"late": "6" * 64}}, "module late"),  # type: ignore[dict-item]
        ({}, {"late_modules": {"on_eval_alone": "6" * 64}}, None),
        ({"torch_build": "2.14"}, {}, "torch (2.13 here, 2.14 there)"),
        ({"packages": {"numpy": "2.1"}}, {}, "numpy (2.0 here, 2.1 there)"),
        ({"device": "cuda"}, {}, "device (cpu here, cuda there)"),
        ({"modules": None}, {}, "loaded code (unset here, unknown there)"),
    ],
)
def test_a_verdict_is_of_the_code_that_ran(
    tmp_path: Path, about: dict[str, Any], env: dict[str, Any], named: str | None
) -> None:
    run = RunFolder(tmp_path / "job" / "run")  # apart from those of the other cases
    run.path.mkdir(parents=True)
    record(run, step(1))
    write(run, task={**TASK, "device": "cpu"}, env={"job": {**CODE, **env}}, answer_verify=answer(**about))
    text = run_page(run)
    assert ("verify: rounding" in text) is (named is None)
    assert named is None or named in text
    assert named is not None or str(run.path / "answer-verify.json") in text


def test_a_module_that_has_changed_since_the_verify_is_named_and_a_secret_is_not(tmp_path: Path) -> None:
    run, other = RunFolder(tmp_path / "job" / "one"), RunFolder(tmp_path / "job" / "two")
    for folder in (run, other):
        folder.path.mkdir(parents=True)
    record(run, step(1))
    settings = {"job.lr": "0.1", "job.api_key": "hush-hush"}
    write(run, task={**TASK, "settings": settings, "device": "cpu"}, env={"job": CODE})
    write(other, answer_verify=answer(settings={"job.lr": "0.1", "job.api_key": "•••"}))
    assert "verify: rounding" in run_page(run) and "hush-hush" not in run_page(run)
    write(other, answer_verify=answer(settings=settings, modules={"job": "1" * 64, "model": "3" * 64}))
    text = run_page(run)
    assert f"Verified in {other.path} with different code than this run&#x27;s: module model" in text
    assert "verify:" not in text and "hush-hush" not in text


def test_only_an_answer_of_the_runs_owner_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = RunFolder(tmp_path / "job" / "one"), RunFolder(tmp_path / "job" / "two")
    for folder in (run, other):
        folder.path.mkdir(parents=True)
    record(run, step(1))
    write(run, task=TASK, env={"job": {"digest": "d" * 64}})
    write(other, answer_verify=ANSWER)
    file, real = other.path / "answer-verify.json", Path.stat
    assert f'<p class="soft">{file}</p>' in run_page(run)

    class Theirs:
        st_uid = os.getuid() + 1

    for whose in (file, other.path):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", lambda self, **more: Theirs() if self == whose else real(self, **more))  # noqa: B023
            assert "verify:" not in run_page(run)
    assert "verify: rounding" in run_page(run)
    file.write_text(json.dumps({**ANSWER, "more": "x" * (5 << 20)}))
    assert "verify:" not in run_page(run)
    file.unlink()
    os.mkfifo(file)
    assert "verify:" not in run_page(run)


def test_loaded_modules_are_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_alone.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("mine_alone")
    found = loaded_modules()
    assert found["mine_alone"] == hashlib.sha256(b"x = 1\n").hexdigest()
    assert not {name for name in found if name.partition(".")[0] in ("paceline", "json", "torch", "pytest", "numpy")}
    assert code_facts("")["modules"] == found and "torch" in code_facts("")["packages"]


@pytest.mark.parametrize(
    ("verb", "failed", "ended", "status", "steps"),
    [
        ("train", 6, False, "failed at step 6", "5 of 12"),
        ("train", 0, False, "failed", "1 of 12"),
        ("evaluate", 6, False, "failed", "1 of 12"),
        ("train", None, False, "failed", "1 of 12"),
        ("train", 6, True, "done", "12 of 12"),
    ],
)
def test_the_page_of_a_failed_run_says_so_and_how_far_it_came(
    tmp_path: Path, verb: str, failed: int | None, ended: bool, status: str, steps: str
) -> None:
    run = RunFolder(tmp_path)
    end = [RunEnded(status="done", step=12, exit_code=0, seconds=1.0)] if ended else []
    record(run, started(2, total_steps=12, attempt=1), step(1), *end)
    run.attempt_folder(1).mkdir(parents=True)
    (run.attempt_folder(1) / "request.json").write_text(json.dumps({"payload": {"verb": verb}}))
    if failed is not None:
        (run.attempt_folder(1) / "first-failure.json").write_text(json.dumps({"rank": 1, "step": failed, "kind": "E"}))
        (run.attempt_folder(1) / "failure-1.json").write_text(json.dumps({"rank": 1, "step": failed, "kind": "E"}))
    text = run_page(run)
    assert f"<dt>status</dt><dd>{status}</dd>" in text and f"<dt>steps</dt><dd>{steps}</dd>" in text
    run.attempt_folder(2).mkdir()  # a later attempt that fails before it has begun
    (run.attempt_folder(2) / "failure-0.json").write_text(json.dumps({"rank": 0, "kind": "ImportError"}))
    assert "<dt>status</dt><dd>failed</dd>" in run_page(run)


def test_a_run_that_is_held_is_running_and_one_that_nobody_holds_has_failed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, started(2, total_steps=12, attempt=1), step(1))
    held = lock_run_folder(tmp_path, on_wait=pytest.fail)
    try:
        assert "<dt>status</dt><dd>running</dd>" in run_page(run)
    finally:
        held.close()
    assert "<dt>status</dt><dd>failed</dd>" in run_page(run)


@pytest.mark.parametrize("value", [10**400, "text", None, [], {}, True, -(10**400), 1e308])
@pytest.mark.parametrize("key", ["step", "samples", "time", "loss", "step_seconds"])
def test_no_value_of_an_event_or_a_number_breaks_the_page(tmp_path: Path, key: str, value: Any) -> None:
    run = RunFolder(tmp_path)
    record(run, started(2, total_steps=12), step(1), step(2))
    for file in (run.events, run.metrics):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines[-1][key] = value
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "</html>" in run_page(run)


def test_half_a_surrogate_is_no_reason_to_have_no_page(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, step(1))
    run.events.write_text(run.events.read_text() + '{"event": "Note", "text": "half \\ud800"}\n')
    assert "half ?" in write_report(run).read_text() and run_page(run).encode()
    assert write_report(run, to=tmp_path / "else.html").read_text() == run.report.read_text()


@pytest.mark.parametrize("at", [[50, 51, 52, 53, 54, 190], [95, 99, 103, 107], list(range(2, 200, 5))])
def test_labels_of_resumes_are_not_written_over_one_another_and_count_them_all(at: list[int]) -> None:
    marks = [ResumeMark(step=step, text="resumed") for step in at]
    drawn = draw_chart("loss", [Curve(name="loss", points=[(1.0, 1.0), (200.0, 2.0)])], marks=marks)
    assert drawn.count('class="mark"') == len(at)
    labels = re.findall(
        r'<text x="([\d.]+)" y="(\d+)" class="tick[^"]*" text-anchor="(\w+)">([^<]*resume[^<]*)</text>', drawn
    )
    assert sum(1 if text == "resumed" else int(text.split()[0]) for *_, text in labels) == len(at)
    spans = []
    for x, row, anchor, text in labels:
        left = float(x) - (5 * len(text) if anchor == "end" else 0)
        spans.append((row, left, left + 5 * len(text)))
    spans.sort()
    assert all(one[0] != after[0] or one[2] <= after[1] for one, after in pairwise(spans)), spans


# compare


def runs(tmp_path: Path, *losses: list[float]) -> list[Path]:
    paths = []
    for number, values in enumerate(losses):
        run = RunFolder(tmp_path / f"run-{number}")
        record(run, started(number + 1), *(step(n, loss=v) for n, v in enumerate(values, start=1)))
        record(run, EvalDone(step=len(values), split="eval", metrics={"loss": values[-1]}, samples=9, seconds=1.0))
        write(run, task={**TASK, "ranks": number + 1})
        paths.append(run.path)
    return paths


def test_compare_says_what_was_set_differently_and_where_losses_part(tmp_path: Path) -> None:
    paths = runs(tmp_path, [3.0, 2.0, 1.0], [3.0, 2.0 * (1 + 1e-9), 1.1], [3.0, 2.0, 1.0])
    found = compare(*paths, page=tmp_path / "compare.html")
    assert found.exit_code == 0
    assert found.settings == {"ranks": ["1", "2", "3"]}
    assert [(one["first"], one["beyond_floor"]) for one in found.losses] == [(2, 3), (None, None)]
    assert [row["eval/loss"] for row in found.runs] == [1.0, 1.1, 1.0]
    assert found.text.endswith("compare.html") and found.page == str(tmp_path / "compare.html")
    assert "replaced the earlier page" in compare(*paths, page=tmp_path / "compare.html").text
    text = (tmp_path / "compare.html").read_text()
    assert "<script" not in text and "http" not in text
    chart = re.search(r'aria-label="loss">.*?</figure>', text)
    assert chart is not None and chart[0].count("<polyline") == 3
    assert all(f"run-{n}" in found.text for n in range(3))


def test_losses_are_drawn_against_samples_seconds_and_bytes_over_all_attempts(tmp_path: Path) -> None:
    paths = runs(tmp_path, [3.0, 2.0, 1.0], [3.0, 2.0, 1.1])
    compare(*paths, page=tmp_path / "compare.html")
    text = (tmp_path / "compare.html").read_text()
    assert 'aria-label="loss against samples"' in text and 'aria-label="loss against seconds"' in text
    assert "loss against bytes" not in text, "neither says what it has sent"
    again = RunFolder(tmp_path / "again")
    record(again, started(2), *(step(n, sent_bytes=100.0 * n) for n in (1, 2, 3)))
    time.sleep(0.05)
    record(again, started(2, resumed_from=2), *(step(n, sent_bytes=10.0 * (n - 2)) for n in (3, 4)))
    history = read_history(again)
    assert history.sent_bytes() == [(1, 100.0), (2, 200.0), (3, 210.0), (4, 220.0)]
    seconds = [value for _, value in history.seconds()]
    assert len(seconds) == 4 and seconds == sorted(seconds) and seconds[-1] < 0.05, "not the time between two attempts"
    assert history.points_against("loss", history.sent_bytes()) == [
        (100.0, 3.0),
        (200.0, 1.5),
        (210.0, 1.0),
        (220.0, 0.75),
    ]
    compare(again.path, again.path, page=tmp_path / "compare.html")
    assert 'aria-label="loss against bytes sent by rank 0"' in (tmp_path / "compare.html").read_text()


def test_runs_without_a_logged_step_in_common_are_compared_all_the_same(tmp_path: Path) -> None:
    one, other = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    record(one, step(1))
    record(other, step(2, loss=math.nan))
    assert "no logged step in common" in compare(one.path, other.path).text


def test_the_keys_of_the_answer_are_fixed(tmp_path: Path) -> None:
    found = compare(*runs(tmp_path, [1.0], [1.0]))
    keys = {"exit_code", "text", "runs", "settings", "losses", "recordings", "first_difference", "page"}
    assert set(vars(found)) == keys
    assert set(found.losses[0]) == {"run", "common", "until", "steps", "first", "beyond_floor", "floor", "largest"}


def test_a_run_s_steps_are_those_it_came_to_and_not_those_it_logged(tmp_path: Path) -> None:
    short, long = RunFolder(tmp_path / "short"), RunFolder(tmp_path / "long")
    record(short, started(1), step(20), step(40), RunEnded(status="stopped", step=45, exit_code=75))
    record(long, started(1), step(20), step(40), step(60), RunEnded(status="done", step=60, exit_code=0))
    found = compare(short.path, long.path)
    assert [one["steps"] for one in found.runs] == [45, 60]
    assert (
        "on all 2 logged steps in common; compared up to step 40: the first run has 45 steps, this one 60" in found.text
    )
    assert (found.losses[0]["steps"], found.losses[0]["until"]) == ((45, 60), 40)
    assert "<dd>45</dd>" in run_page(short)
    assert "compared up to" not in compare(long.path, long.path).text
    time.sleep(0.002)
    record(short, started(2, resumed_from=30), step(32))
    assert read_history(short).last_step() == 32, "what a later attempt went back over does not count"


@pytest.mark.parametrize(
    ("first", "head", "log"),
    [
        (
            {"rank": -1, "kind": "signal", "message": "the process that starts the ranks was ended by SIGKILL"},
            "the process that starts the ranks",
            "logs/attempt-1</p>",
        ),
        ({"rank": 1, "kind": "timeout", "message": "no answer", "told_by": 0}, ": rank 1<", "attempt-1/rank-0.log"),
    ],
)
def test_the_page_names_a_log_that_is_there(tmp_path: Path, first: dict[str, object], head: str, log: str) -> None:
    folder = tmp_path / "logs" / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "first-failure.json").write_text(json.dumps(first))
    page = show_failures(read_history(RunFolder(tmp_path)))
    assert head in page and log in page and "rank -1" not in page and "rank--1" not in page


def test_a_failure_says_how_the_run_restarted(tmp_path: Path) -> None:
    for attempt in (1, 2):
        folder = tmp_path / "logs" / f"attempt-{attempt}"
        folder.mkdir(parents=True)
        (folder / "first-failure.json").write_text(json.dumps({"rank": 1, "kind": "signal", "message": "SIGKILL"}))
    event = Restarted(
        attempt=2, reason="rank 1 killed", failed_step=18, resumed_step=17, repeated_steps=1, seconds=0.14
    )
    damaged = {"event": "Restarted", "attempt": "three"}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (as_dict(event), damaged)))
    first, second = show_failures(read_history(RunFolder(tmp_path))).split("Attempt 2")
    assert "restarted in 0.14 s from step 17 (disk); 1 step repeated" in first and "restarted" not in second


@pytest.mark.parametrize(("total", "text"), [(20, "12 of 20"), (12, "12 of 12"), (10, "12")])
def test_the_head_counts_steps_of_a_length_that_is_not_behind_them(tmp_path: Path, total: int, text: str) -> None:
    run = RunFolder(tmp_path)
    record(run, started(1, total_steps=total), step(12))
    assert f"<dt>steps</dt><dd>{text}</dd>" in run_page(run)


def test_an_axis_of_a_few_seconds_has_no_number_twice() -> None:
    drawn = draw_chart("loss against seconds", [Curve(name="", points=[(0.62, 4.0), (1.47, 3.0)])])
    assert re.findall(r'y="\d+" class="tick" text-anchor="\w+">([^<]+)<', drawn) == ["0.62", "1.04", "1.47"]
    steps = draw_chart("loss", [Curve(name="", points=[(1, 4.0), (3, 3.0)])])
    assert re.findall(r'y="\d+" class="tick" text-anchor="\w+">([^<]+)<', steps) == ["1", "2", "3"]


@pytest.mark.parametrize(("exit_code", "status"), [(2, "done"), (1, "failed")])
def test_a_resume_that_was_refused_leaves_the_status_of_a_finished_run(
    tmp_path: Path, exit_code: int, status: str
) -> None:
    run = RunFolder(tmp_path)
    record(run, started(1), step(12), RunEnded(status="done", step=12, exit_code=0))
    refused = {"rank": 0, "kind": "ResumeError", "message": "this run differs", "exit_code": exit_code}
    run.attempt_folder(2).mkdir(parents=True)
    (run.attempt_folder(2) / "first-failure.json").write_text(json.dumps(refused))
    assert run_status(read_history(run)) == status


def test_a_run_on_several_nodes_shows_the_lines_of_why_and_when_the_head_was_lost(tmp_path: Path) -> None:
    stays = NodeStays()
    for attempt, nodes in enumerate([(0, 1), (0, 1), (0,)], 1):
        some = [NodeStay.begin(n, host=f"host{n}", address="", ranks=range(n, n + 1)) for n in nodes]
        stays.begin_attempt(tmp_path, attempt, some)
    stays.leave(1, "it was asked to stop")
    events: list[dict[str, Any]] = [
        {"event": "RunStarted", "attempt": 1, "time": 10.0},
        {"event": "StepDone", "step": 60, "time": 14.0},
        {"event": "RunStarted", "attempt": 2, "time": 30.4, "resumed_from": 60},
        {"event": "RunEnded", "status": "stopped", "step": 70, "time": 40.0},
        {"event": "RunStarted", "attempt": 3, "time": 41.0, "resumed_from": 70},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    history = read_history(RunFolder(tmp_path))
    failures, nodes_table = show_failures(history), show_nodes(history)
    lines = attempt_lines(history)
    assert len(lines) == 2 and all(f"<li>{escape(line)}</li>" in failures for line in lines), failures
    assert "started again from step 60 (disk) after 16.4 s" in lines[0], lines
    assert "left (it was asked to stop) at step 70 after 1.0 s; continued on 1 node" in lines[1], lines
    assert "<td>1970-01-01T00:00:14Z: its agent ended without a message</td>" in nodes_table
    assert re.search(r"<td>[^<]*Z: it was asked to stop</td>", nodes_table), nodes_table
