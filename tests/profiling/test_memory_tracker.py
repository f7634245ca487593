"""The measured side of a memory forecast is exact to the byte, and reports what it cannot see."""

import subprocess
import sys
import threading
from mmap import mmap
from pathlib import Path

import pytest
import torch
from benchmarks.memory.allocator import Event, count_all_threads, replay, watch
from benchmarks.memory.measured import Setting, measure
from benchmarks.memory.resident import forget_most, resident_most, resident_now
from benchmarks.memory.settings import settings
from torch import Tensor, nn

from paceline.config.layout import parse_layout
from paceline.profiling.model_tracing.memory_tracker import MemoryTracker

pytestmark = pytest.mark.one_worker  # what they share is made once

MB = 1 << 20


@pytest.fixture(autouse=True)
def counting() -> None:
    count_all_threads()


def block(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_what_is_given_taken_and_resized_is_counted_to_the_byte(tmp_path: Path) -> None:
    with watch(folder=tmp_path) as watching:
        with watching.step(2):
            first = block(MB)
            second = block(2 * MB)
            del first
            third = block(3 * MB)
            second.untyped_storage().resize_(5 * MB)  # the new block is there before the old one goes: 3 + 2 + 5
            third.untyped_storage().resize_(0)
        with watching.step(3):
            third.untyped_storage().resize_(4 * MB + 7)
    account = watching.account
    assert account.peak - account.live_before == 10 * MB
    assert [peak - account.live_before for peak in account.peaks] == [10 * MB, 9 * MB + 7]
    assert account.live_after - account.live_before == sum(account.blocks_left.values()) == 9 * MB + 7
    assert account.unseen_bytes == 0 and account.phase == "forward" and account.inside[0] == "measured step 2"
    assert list(tmp_path.iterdir()) == []


def test_blocks_of_other_threads_and_from_before_are_in_the_sum(tmp_path: Path) -> None:
    held = {"before": block(MB)}

    def work() -> None:
        del held["before"]
        held["meanwhile"] = block(3 * MB)

    with watch(folder=tmp_path) as watching:
        block(1)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        block(1)
    account = watching.account
    assert account.live_after - account.live_before == 2 * MB
    assert account.peak - account.live_before == 2 * MB + 1
    assert account.unseen_bytes == 2 * MB, "what moved between two events is told by its sum"


class Squares(nn.Module):
    """Keeps one megabyte more with each square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MB // 4))

    def forward(self, times: int) -> Tensor:
        x: Tensor = self.weight
        for _ in range(times):
            x = x.square()
        return x.sum()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Tensor] | None = None) -> None:
    loss = model(4)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if kept is not None:
        kept.append(torch.ones(1000))


def test_it_agrees_with_the_forecasts_instrument_where_that_sees_all(tmp_path: Path) -> None:
    model = Squares()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    with MemoryTracker(model=model, optimizers=[optimizer]) as other:
        trained(model, optimizer)
    with watch(folder=tmp_path) as watching:
        trained(model, optimizer)
    between = 3 * MB + 4  # weight, two moments, a step number
    assert watching.account.peak - watching.account.live_before == other.peak.total - between
    assert watching.account.phase == "backward"


def test_a_tensor_that_leaks_shows(tmp_path: Path) -> None:
    model = Squares()
    optimizer = torch.optim.AdamW(model.parameters())
    leak: list[Tensor] = []
    found = {}
    for name, kept in (("sound", None), ("leaks", leak)):
        trained(model, optimizer)
        with watch(folder=tmp_path) as watching:
            for number in (2, 3):
                with watching.step(number):
                    trained(model, optimizer, kept)
        found[name] = watching.account
    grown = {name: account.live_after - account.live_before for name, account in found.items()}
    assert grown == {"sound": 0, "leaks": 2 * 4000}
    assert found["leaks"].peaks[1] - found["leaks"].peaks[0] == 4000 and len(set(found["sound"].peaks)) == 1
    assert sorted(found["leaks"].blocks_left.values()) == [4000, 4000] and not found["sound"].blocks_left


def test_what_has_no_event_is_added_up() -> None:
    def event(at: float, num_bytes: int, total: int) -> Event:
        return Event(at=at, num_bytes=num_bytes, total=total, address=int(at), thread=1)

    account = replay([event(1, 10, 110), event(2, 5, 145), event(3, -5, 100)])
    assert (account.live_before, account.peak, account.live_after, account.unseen_bytes) == (100, 145, 100, 30 + 40)
    with pytest.raises(RuntimeError, match="reported nothing"):
        replay([])


def test_two_runs_of_one_setting_hold_the_same() -> None:
    setting = Setting(family="mlp", layout="ddp", ranks=2, job={"width": 128, "depth": 2})
    first, second = measure(setting), measure(setting)
    assert [row["rank"] for row in first] == [0, 1] and first[0]["micro_batch"] == 4
    numel = 256 * 128 + 128 + 2 * (128 * 128 + 128) + 128 * 10 + 10
    for row, other in zip(first, second, strict=True):
        assert row["parameters"] == row["gradients"] == 4 * numel and row["optimizer"] == 8 * numel + 4 * 8
        between = sum(row[kind] for kind in ("parameters", "gradients", "optimizer", "buffers"))
        assert 0 <= row["live_before"] - between < 200_000  # the batch that the loop still has, what DDP keeps
        assert row["peak_live"] == other["peak_live"] > row["live_before"]
        assert row["rss_peak"] >= row["rss_before"] > row["peak_live"]


def test_the_kernels_most_can_begin_anew() -> None:
    if not forget_most():
        pytest.skip("/proc/self/clear_refs can't be written here")
    before = resident_now()
    with mmap(-1, 64 * MB) as held:  # which goes back at once, whatever the allocator holds on to
        for page in range(0, 64 * MB, 4096):
            held[page] = 1
        assert resident_now() - before > 60 * MB
    assert resident_most() - before > 60 * MB
    assert forget_most() and resident_most() - before < 30 * MB


GROWS = [
    ("ddp", {}),
    ("zero1", {}),
    ("zero2", {}),
    ("fsdp", {}),
    ("tp", {}),
    ("pp", {"micro": 2}),
    ("cp", {}),
    ("ep", {}),
]


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "more"), GROWS, ids=[layout for layout, _ in GROWS])
def test_no_step_leaves_more_than_the_one_before(layout: str, more: dict[str, int]) -> None:
    family = "mixtral" if layout == "ep" else "llama"
    sizes = {"width": 64, "depth": 2, "length": 32, "vocabulary": 128, "heads": 4}
    for row in measure(Setting(family=family, layout=layout, ranks=2, job=sizes, **more)):
        first, second = row["peaks"]
        assert abs(second - first) < (0.1 if layout == "ep" else 0.02) * first, (
            row
        )  # experts get as many tokens as come


def test_the_list_names_every_family_and_kind_of_layout_once() -> None:
    found = settings()
    assert len(found) == len({str(each) for each in found}) >= 60
    assert len({each.family for each in found}) >= 12
    for each in found:
        parse_layout(each.layout)
        assert 1 <= each.ranks <= 4


def test_the_command_lists_and_refuses() -> None:
    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "benchmarks.memory", *words]
        root = Path(__file__).resolve().parents[2]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=120)

    listed = run("--list", "--only", "llama fsdp*")
    assert listed.returncode == 0 and listed.stdout.startswith("llama fsdp"), listed
    refused = run("mlp", "tp", "--ranks", "3", "--depth=2")
    assert refused.returncode == 1 and "--job.NAME=VALUE" in refused.stderr, refused
