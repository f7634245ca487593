"""Layouts are timed on this machine, and `plan --cluster here` reports it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.process_group import World
from paceline.commands.common.execution import RunOptions, make_task
from paceline.measured_planning.profile.truncated_model import truncate_block_lists
from paceline.measured_planning.timing.layout_timing import can_truncate_blocks, extrapolation_depths, time_layouts
from paceline.planner.cost.estimate import MeasuredTime
from paceline.planner.search.shortlist import RejectedLayout, TimingTrial
from paceline.trainer.setup.prepare import PreparedJob, prepare
from tests import zoo

ROOT = Path(__file__).resolve().parents[2]
TAKES = 0.01  # seconds of a block by the clock of these tests
NOW = [0.0]


def clock() -> float:
    """Read the time, which blocks alone let pass."""
    return NOW[0]


def time_by_it(ready: PreparedJob, tries: Sequence[TimingTrial], *, depths: Sequence[int] = (), seconds: float) -> Any:
    return time_layouts(ready, tries, depths=depths, world=World.alone(), seconds=seconds, clock=clock)


class Slow(nn.Module):
    """A block that takes a known time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        NOW[0] += TAKES
        found: torch.Tensor = self.linear(x)
        return found


def slow(depth: int = 12) -> pl.Job:
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 8))
    return pl.Job(
        model=lambda: nn.Sequential(*[Slow() for _ in range(depth)]),
        loss=lambda output, batch: ((output - batch[1]).square().sum(), output.numel()),
        train_data=data,
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1e-3),
        global_batch_size=4,
    )


def ready_of(job: str, *typed: str) -> PreparedJob:
    return prepare(make_task("plan", job, RunOptions(ranks=1, device="cpu", quiet=True), list(typed)))


def one(
    candidate: str, *, micro: int, layout: str = "dp_replicate=1", share: float = 0.1, seconds: float = 0.0
) -> TimingTrial:
    return TimingTrial(
        candidate=candidate,
        layout=layout,
        micro_batch_size=micro,
        min_blocks=2,
        peak_fraction=share,
        state_fraction=share / 2,
        seconds=seconds,
    )


def test_the_first_and_last_of_like_blocks_stay() -> None:
    model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(7)])
    ends = model[0], model[-1]
    assert truncate_block_lists(model, 3) == [7]
    assert len(model) == 3 and (model[0], model[-1]) == ends
    assert truncate_block_lists(model, 3) == []


def test_blocks_that_are_not_alike_all_stay() -> None:
    model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16 + n) for n in range(5)])
    assert truncate_block_lists(model, 3) == [] and len(model) == 5


@pytest.mark.parametrize(
    ("least", "depths", "kept"),
    [
        (2, [12], [None]),
        (2, [24], [2, 8]),
        (2, [48], [4, 16]),
        (8, [24], [None]),
        (8, [48], [8, 16]),
        (4, [24, 24], [2, 8]),
        (2, [], [None]),
    ],
)
def test_two_lengths_that_are_shorter_or_the_whole(least: int, depths: list[int], kept: list[int | None]) -> None:
    tried = TimingTrial(candidate="", layout="", micro_batch_size=1, min_blocks=least, peak_fraction=0.1)
    assert extrapolation_depths(tried, depths) == kept


def test_the_line_through_two_lengths_comes_to_the_whole_model() -> None:
    """Of 24 blocks 2 and 8 are run; a forward takes its time in every block, once for each microbatch."""
    ready = ready_of("tests.measured_planning.test_layout_timing:slow", "--job.depth=24")
    assert can_truncate_blocks(ready)
    tries = [one("whole", micro=4), one("halves", micro=2)]
    found = time_by_it(ready, tries, depths=[24], seconds=3.0)
    for name, micro in (("whole", 1), ("halves", 2)):
        own = found[name]
        assert isinstance(own, MeasuredTime)
        assert own.blocks == (2, 8) and own.steps >= 4
        assert own.seconds == pytest.approx(24 * TAKES * micro) and own.spread == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("share", "before"), [(0.4, [0, 0, 0]), (0.3, [0, 1, 0])])
def test_what_has_no_room_beside_others_is_timed_after_them(share: float, before: list[int]) -> None:
    """Half of it stays between steps; half of the memory is there for all."""
    ready = ready_of("tests.measured_planning.test_layout_timing:slow", "--job.depth=3")
    tries = [one(str(n), micro=4, share=share) for n in range(3)]
    with watched_closes() as closes:
        found = time_by_it(ready, tries, seconds=3.0)
    assert {*found} == {"0", "1", "2"} and closes == before


@contextmanager
def watched_closes() -> Iterator[list[int]]:
    """How many other trials are alive when one is made."""
    from paceline.measured_planning.timing import layout_timing as module

    alive, seen = [0], list[int]()
    made, close = module._Trial.__init__, module._Trial.close

    def init(self: Any, **given: Any) -> None:
        seen.append(alive[0])
        alive[0] += 1
        made(self, **given)

    def closed(self: Any) -> None:
        alive[0] -= 1
        close(self)

    module._Trial.__init__, module._Trial.close = init, closed  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        module._Trial.__init__, module._Trial.close = made, close  # type: ignore[method-assign]


def test_a_layout_that_is_refused_is_told_and_the_others_are_timed() -> None:
    ready = ready_of("tests.measured_planning.test_layout_timing:slow", "--job.depth=3")
    tries = [one("bad", micro=2, layout="tp=2"), one("good", micro=2)]
    found = time_by_it(ready, tries, seconds=0.5)
    assert isinstance(found["good"], MeasuredTime) and isinstance(found["bad"], RejectedLayout)


class Picky(nn.Module):
    """As BatchNorm is of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        NOW[0] += TAKES
        if len(x) == 1:
            raise ValueError("more than one sample, please")
        found: torch.Tensor = self.linear(x)
        return found


def picky() -> pl.Job:
    return replace(slow(), model=Picky)


def test_a_size_that_the_jobs_own_code_refuses_is_told_and_the_others_are_timed() -> None:
    ready = ready_of("tests.measured_planning.test_layout_timing:picky")
    tries = [one("bad", micro=1), one("good", micro=2)]
    found = time_by_it(ready, tries, seconds=0.5)
    assert isinstance(found["good"], MeasuredTime)
    refused = found["bad"]
    assert isinstance(refused, RejectedLayout) and refused.is_job_error
    assert "ValueError: more than one sample, please" in refused.reason and "test_layout_timing.py" in refused.reason
    with pytest.raises(pl.JobError, match=r"none of 1 layouts.*ValueError: more than one sample"):
        time_by_it(ready, tries[:1], seconds=0.5)


class Tired(nn.Module):
    """Its microbatches of one sample fail from the thirtieth on, and so does every other where `all_of_it` does."""

    def __init__(self, all_of_it: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.all_of_it = all_of_it
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls >= 30 and (self.all_of_it or len(x) == 1):
            raise ValueError("enough of that")
        NOW[0] += TAKES / 4
        found: torch.Tensor = self.linear(x)
        return found


def tired(all_of_it: bool = False) -> pl.Job:
    return replace(slow(), model=lambda: Tired(all_of_it))


def test_a_layout_that_is_refused_in_a_later_step_is_told_and_the_others_are_timed() -> None:
    """Its first visits are well: the thirtieth microbatch of one sample is in its eighth step."""
    ready = ready_of("tests.measured_planning.test_layout_timing:tired")
    tries = [one("bad", micro=1), one("good", micro=2)]
    found = time_by_it(ready, tries, seconds=2.0)
    assert isinstance(found["good"], MeasuredTime) and found["good"].steps > 24
    refused = found["bad"]
    assert isinstance(refused, RejectedLayout) and refused.is_job_error
    assert "ValueError: enough of that" in refused.reason and "test_layout_timing.py" in refused.reason
    ready = ready_of("tests.measured_planning.test_layout_timing:tired", "--job.all_of_it=true")
    with pytest.raises(pl.JobError, match=r"none of 2 layouts.*ValueError: enough of that"):
        time_by_it(ready, tries, seconds=2.0)


@pytest.mark.parametrize("order", [("bad", "good"), ("good", "bad")])
def test_what_is_refused_with_no_room_beside_others_ends_nothing(order: tuple[str, str]) -> None:
    ready = ready_of("tests.measured_planning.test_layout_timing:picky")
    tries = [one(name, micro=1 if name == "bad" else 2, share=0.45) for name in order]
    found = time_by_it(ready, tries, seconds=0.5)
    assert isinstance(found["good"], MeasuredTime) and isinstance(found["bad"], RejectedLayout)


def deep() -> pl.Job:
    def model() -> nn.Module:
        found = nn.Sequential(*[Slow() for _ in range(24)])

        def refuse(module: nn.Sequential, given: tuple[torch.Tensor, ...]) -> None:
            if len(module) == 8 and len(given[0]) == 1:
                raise ValueError("one sample in eight blocks")

        found.register_forward_pre_hook(refuse)
        return found

    return replace(slow(), model=model)


def test_a_shorter_model_whose_longer_one_is_refused_is_not_the_quickest() -> None:
    """Of 24 blocks 2 and 8 are run: two blocks alone say nothing of the others' order."""
    ready = ready_of("tests.measured_planning.test_layout_timing:deep")
    tries = [one("bad", micro=1), one("good", micro=4)]
    found = time_by_it(ready, tries, depths=[24], seconds=3.0)
    assert isinstance(found["bad"], RejectedLayout)
    own = found["good"]
    assert isinstance(own, MeasuredTime) and own.blocks == (2, 8) and own.steps > 12


def test_it_ends_sooner_where_steps_are_many() -> None:
    ready = ready_of("tests.measured_planning.test_layout_timing:slow", "--job.depth=1")
    began = clock()
    found = time_by_it(ready, [one("short", micro=4)], seconds=6.0)["short"]
    assert isinstance(found, MeasuredTime) and found.steps >= 24
    assert 4.0 <= clock() - began < 6.0
    ready = ready_of("tests.measured_planning.test_layout_timing:slow", "--job.depth=40")
    began = clock()
    found = time_by_it(ready, [one("long", micro=4)], seconds=3.0)["long"]
    assert isinstance(found, MeasuredTime) and found.steps < 24
    assert clock() - began >= 3.0


def test_what_is_far_behind_is_left_after_its_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.measured_planning.timing import layout_timing as module

    ready = ready_of("tests.measured_planning.test_layout_timing:slow", "--job.depth=1")
    tries = [one("quick", micro=4), one("slow", micro=1)]  # one block in a step, and four
    monkeypatch.setattr(module, "_TOO_SLOW_RATIOS", (9.0, 2.5))
    found = time_by_it(ready, tries, seconds=2.0)
    assert [one.steps for one in found.values() if isinstance(one, MeasuredTime)][1:] == [1]
    monkeypatch.setattr(module, "_TOO_SLOW_RATIOS", (9.0, 9.0))
    found = time_by_it(ready, tries, seconds=2.0)
    assert [one.steps for one in found.values() if isinstance(one, MeasuredTime)][1:] != [1]


@pytest.mark.parametrize(("hopeless", "looks"), [((3.0, 1.3, 1.2), True), ((1.5, 1.3, 1.2), False)])
def test_what_is_somewhat_slower_has_its_turn_once_the_quick_have_steps_enough(
    monkeypatch: pytest.MonkeyPatch, hopeless: tuple[float, ...], looks: bool
) -> None:
    """The slower one takes twice as long: after its second round nobody looks at it, until the other has had enough."""
    from paceline.measured_planning.timing import layout_timing as module

    monkeypatch.setattr(module, "_DROP_RATIOS", hopeless)
    ready = ready_of("tests.measured_planning.test_layout_timing:slow", "--job.depth=1")
    tries, began = [one("quick", micro=4), one("slow", micro=2)], time.time()
    found = time_by_it(ready, tries, seconds=3.0)
    quick, slow = found["quick"], found["slow"]
    assert isinstance(quick, MeasuredTime) and isinstance(slow, MeasuredTime)
    assert quick.steps >= 24 and (slow.steps >= 24) is looks
    assert began <= slow.between[0] and 1.9 < slow.between[1] - slow.between[0] < 3.1


@pytest.mark.parametrize(("forecast", "looks"), [(1.1, True), (1.3, False), (0.0, False)])
def test_what_was_slow_once_against_its_forecast_has_another_look(
    monkeypatch: pytest.MonkeyPatch, forecast: float, looks: bool
) -> None:
    """The machine is busy in the other one's first visit alone; what that took is forgotten."""
    from paceline.measured_planning.timing import layout_timing as module

    step, busy = module._Trial.run_step, ["busy"]

    def disturbed(self: module._Trial) -> float:
        taken = step(self)
        return 3 * taken if self.candidate in busy and not self.seconds else taken

    monkeypatch.setattr(module._Trial, "run_step", disturbed)
    ready = ready_of("tests.measured_planning.test_layout_timing:slow", "--job.depth=1")
    tries = [one("quiet", micro=4, seconds=1.0), one("busy", micro=4, seconds=forecast)]
    found = time_by_it(ready, tries, seconds=3.0)
    quiet, disturbed_one = found["quiet"], found["busy"]
    assert isinstance(quiet, MeasuredTime) and isinstance(disturbed_one, MeasuredTime)
    assert disturbed_one.seconds == pytest.approx(quiet.seconds * (1 if looks else 3))
    assert (disturbed_one.steps >= 24) is looks


def test_what_the_probe_leaves_of_a_minute_is_for_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.commands import plan as module

    now = [0.0]

    class Found:
        class cluster:
            as_json = dict

    def probed(taking: float) -> None:
        monkeypatch.setattr(module, "benchmark_local_machine", lambda **_: now.__setitem__(0, now[0] + taking) or Found)

    task = make_task("plan", "tests.zoo:llama", RunOptions(ranks=1, device="cpu", quiet=True), [])
    left = []
    for taking in (0.0, 20.0, 50.0):
        probed(taking)
        left.append(module._local_machine(task, None, clock=lambda: now[0])["seconds"])
    assert left == [60.0, 40.0, 30.0]
    assert module._local_machine(task, 8.0)["seconds"] == 8.0


@pytest.mark.soak
def test_plan_here_times_layouts_and_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "plan", "tests.zoo:llama", "--cluster", "here", "--ranks", "2"]
    command += ["--json", "--seconds", "10", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    best = min(told["timed"], key=lambda found: found["step_seconds"])
    first = next(row for row in told["plans"] if row["layout"] == told["recommended"])
    assert first["step_seconds"] == best["step_seconds"] or told["tie"]["step_seconds"] == best["step_seconds"]
    assert first["timed"]["steps"] > 4
    assert len({row["family"] for row in told["plans"] if row["timed"]}) > 3
    assert first["fits"] and first["replayed"]
    assert zoo.llama().global_batch_size % int(first["settings"]["train.micro_batch_size"]) == 0
