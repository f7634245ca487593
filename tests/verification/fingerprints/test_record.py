"""`pl.record` in a plain loop, DDP, Accelerate and Lightning against a run of ours names where two runs diverge."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.errors import UsageError
from paceline.verification.fingerprints.fingerprint import digest_bits, num_ranks, projection_signs, read_recording
from paceline.verification.fingerprints.record import fingerprint_tensor

STEPS, BATCH = 6, 16


class Data(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(STEPS * BATCH, 8, generator=generator)
        self.y = torch.randint(0, 4, (STEPS * BATCH,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches() -> DataLoader[Any]:
    return DataLoader(Data(), batch_size=BATCH)


def plain(path: Path, *, spoil: Callable[[int, nn.Module], None] = lambda step, model: None, every: int = 1) -> None:
    model = build()
    optimizer = adam(model)
    with pl.record(model, optimizer, path, every=every) as recorder:
        for number, (x, y) in enumerate(batches(), start=1):
            recorder.batch((x, y))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            spoil(number, model)
            optimizer.step()


def ours(path: Path, folder: Path) -> None:
    job = pl.Job(
        model=build,
        train_data=Data(),
        loss=lambda out, batch: (F.cross_entropy(out, batch[1], reduction="sum"), len(batch[1])),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        global_batch_size=BATCH,
        order="sequential",
    )
    settings = {"watch.to": ("jsonl",), "checkpoint.consolidated": "none"}
    run = pl.Run(job, ranks=1, run_dir=folder, settings=settings)
    with run, pl.record(run.model, run.optimizers, path):
        for batch in run.batches():
            run.step(batch)


def halve(step: int, model: nn.Module) -> None:
    if step == 3:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2


def freeze(step: int, model: nn.Module) -> None:
    if step == 4:
        model.get_parameter("2.weight").grad = None


def test_our_run_is_a_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    ours(tmp_path / "b", tmp_path / "run")
    assert pl.compare(tmp_path / "a", tmp_path / "b").text.startswith(f"bitwise: {STEPS} steps")


def test_a_fault_is_named_by_step_parameter_and_cause(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    plain(tmp_path / "b", spoil=halve)
    plain(tmp_path / "c", spoil=freeze)
    halved, frozen = pl.compare(tmp_path / "a", tmp_path / "b"), pl.compare(tmp_path / "a", tmp_path / "c")
    assert halved.exit_code == frozen.exit_code == 4
    assert halved.first_difference is not None and frozen.first_difference is not None
    assert halved.first_difference["step"] == 3
    assert "a factor of 2" in halved.first_difference["cause"]
    assert (frozen.first_difference["step"], frozen.first_difference["parameter"]) == (4, "2.weight")


def test_of_several_ranks_the_earliest_divergence_is_named(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    for rank, spoil in ((1, freeze), (2, halve)):
        plain(tmp_path / str(rank), spoil=spoil)
        (tmp_path / str(rank) / "rank-0.jsonl").rename(tmp_path / "a" / f"rank-{rank}.jsonl")
    plain(tmp_path / "b", spoil=halve)
    assert "rank 2 diverges from rank 0 at step 3" in pl.compare(tmp_path / "b", tmp_path / "a").text


def test_other_start_weights_are_no_other_gradient(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 1.5)):
        model = build()
        with torch.no_grad():
            model.get_parameter("0.bias").mul_(scale)
        optimizer = adam(model)
        with pl.record(model, optimizer, tmp_path / name):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    first = pl.compare(tmp_path / "a", tmp_path / "b").first_difference
    assert first is not None
    assert (first["step"], first["parameter"]) == (0, "0.bias")
    assert "before the first step" in first["cause"]


def test_every_tenth_step_only(tmp_path: Path) -> None:
    plain(tmp_path / "a", every=3)
    assert [record.step for record in read_recording(tmp_path / "a").records] == [0, 1, 4]


def test_recordings_of_unequal_length_say_what_was_not_compared(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    plain(tmp_path / "b")
    lines = (tmp_path / "b" / "rank-0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b" / "rank-0.jsonl").write_text("".join(lines[:5]))
    assert "were compared" not in pl.compare(tmp_path / "a", tmp_path / "a").text
    found = pl.compare(tmp_path / "a", tmp_path / "b")
    assert found.exit_code == 0
    assert found.text.startswith("bitwise: 4 steps")
    assert f"only steps in both were compared: the first recording has {STEPS}, the other 4" in found.text
    assert (found.recordings[0]["steps"], found.recordings[0]["recorded"]) == (4, (STEPS, 4))


def doubled(line: bytes) -> bytes:
    """The same start with a bias of twice the size."""
    value = json.loads(line)
    numel, norm, largest, projections, _, *rest = value["weights"]["0.bias"]
    value["weights"]["0.bias"] = [numel, 2 * norm, 2 * largest, [2 * p for p in projections], "another", *rest]
    return json.dumps(value).encode() + b"\n"


HALF = "the last line is incomplete, as after a kill, and was left out"
WRITTEN: dict[str, tuple[Callable[[list[bytes]], bytes], int, str]] = {  # what is in b, the exit code, and a part of what is said
    "whole": (b"".join, 0, f"bitwise: {STEPS} steps"),
    "half of the last line": (lambda lines: b"".join(lines)[:-100], 0, HALF),
    "one byte of the last line": (lambda lines: b"".join(lines[:-1]) + b"{", 0, HALF),
    "no newline at the end": (lambda lines: b"".join(lines)[:-1], 0, f"bitwise: {STEPS} steps"),
    "zeros after the last line": (lambda lines: b"".join(lines) + bytes(100), 0, HALF),
    "a difference before half a line": (lambda lines: b"".join([*lines[:2], lines[3].replace(b'"step": 3', b'"step": 2'), lines[3]])[:-9], 4, HALF),
    "ended after step 2": (lambda lines: b"".join(lines[:3]), 0, f"the first recording has {STEPS}, the other 2"),
    "the start only": (lambda lines: lines[0], 2, "no step in common"),
    "another start alone": (lambda lines: doubled(lines[0]), 4, "different: first at the start, weight of 0.bias"),
    "no step of the other": (lambda lines: lines[1].replace(b'"step": 1', b'"step": 77'), 2, "no step in common"),
    "half of its only line": (lambda lines: lines[0][:50], 2, "has no step: its only line is incomplete"),
    "empty": (lambda lines: b"", 2, "has no step: it is empty"),
    "a whole last line that is none": (lambda lines: b"".join(lines[:-1]) + lines[-1][:50] + b"\n", 2, "is not a step of a recording"),
    "half a line in the middle": (lambda lines: b"".join(lines[:2]) + lines[2][:50] + b"\n" + lines[3], 2, "line 3 is not a step"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_recording_that_is_torn_or_ends_early_has_the_exit_code_of_what_was_compared(
    tmp_path: Path, name: str
) -> None:
    """0 and 4 are verdicts on steps that both have; where there is none nothing was compared, which is refused."""
    write, code, said = WRITTEN[name]
    plain(tmp_path / "a")
    (tmp_path / "b").mkdir()
    lines = (tmp_path / "a" / "rank-0.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "b" / "rank-0.jsonl").write_bytes(write(lines))
    try:
        found = pl.compare(tmp_path / "a", tmp_path / "b")
    except UsageError as error:
        assert (int(error.exit_code), said in error.what) == (code, True), error.what
        return
    assert (found.exit_code, said in found.text) == (code, True), found.text
    assert (HALF in found.text) == (said == HALF)


def test_a_closure_is_looked_at_after_it_has_run(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    model = build()
    optimizer = adam(model)
    recorder = pl.record(model, optimizer, tmp_path / "b")
    for number, (x, y) in enumerate(batches()):

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if number % 2:
            optimizer.step(closure)
        else:
            optimizer.step(closure=closure)
    recorder.close()
    recorder.close()
    assert pl.compare(tmp_path / "a", tmp_path / "b").text.startswith("bitwise")


def test_each_of_several_optimizers_speaks_for_its_own(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        model = build()
        first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[3].parameters(), lr=rate)
        with pl.record(model, [first, second], tmp_path / name):
            for x, y in batches():
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                first.step()
                second.step()
    records = [r for r in read_recording(tmp_path / "a").records if r.step == 1]
    assert [set(r.weights) for r in records] == [
        {"0.weight", "0.bias", "2.weight", "2.bias"},
        {"3.weight", "3.bias"},
    ]
    found = pl.compare(tmp_path / "a", tmp_path / "b").first_difference
    assert found is not None
    assert (found["step"], found["kind"], found["parameter"][0]) == (1, "weight", "3")


def test_wrapped_and_thawing_models_keep_their_names(tmp_path: Path) -> None:
    inner = build()
    inner[0].requires_grad_(False)
    model = nn.DataParallel(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    with pl.record(model, optimizer, tmp_path / "a"):
        for number, (x, y) in enumerate(batches(), start=1):
            inner[0].requires_grad_(number > 2)
            F.cross_entropy(inner(x), y).backward()
            optimizer.step()
    found = {record.step: set(record.gradients) for record in read_recording(tmp_path / "a").records}
    assert found[2] == {"2.weight", "2.bias", "3.weight", "3.bias"}
    assert found[3] == {name for name, _ in inner.named_parameters()}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.complex64])
def test_any_kind_of_parameter(tmp_path: Path, kind: torch.dtype) -> None:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.ones(3, 4, dtype=kind)))
    model.register_parameter("none", nn.Parameter(torch.ones(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pl.record(model, optimizer, tmp_path / "a"):
        model.get_parameter("w").grad = torch.full((3, 4), 2.0, dtype=kind)
        optimizer.step()
    last = read_recording(tmp_path / "a").records[-1]
    assert last.gradients["w"].norm == 12**0.5 * 2
    assert last.weights["w"].largest == 0.0


@pytest.mark.parametrize("numel", [0, 1, 4096, 10_001])
def test_torch_and_numpy_give_one_print(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    found, array = fingerprint_tensor(values), values.double().numpy()
    position_signs, block_signs = projection_signs(numel)
    padded = np.zeros(len(block_signs) * len(position_signs))
    padded[:numel] = array
    projections = (padded.reshape(len(block_signs), len(position_signs)) @ position_signs * block_signs).sum(axis=0)
    largest = float(np.max(np.abs(array), initial=0.0))
    assert (found.numel, found.largest) == (numel, largest)
    assert found.digest == digest_bits(memoryview(values.view(torch.uint8).numpy()) if numel else b"")
    # sums of at most 10,001 float64 in two orders: 1e4 * 2^-53 of the sum of magnitudes at worst
    bound = numel * numel * 2.0**-53 * (largest or 1.0)
    assert found.projections == pytest.approx(projections.tolist(), abs=bound)
    assert found.norm == pytest.approx(float(np.linalg.norm(array)), rel=1e-12)


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pl.UsageError, match="got a Linear"):
        pl.record(nn.Linear(1, 1), nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(pl.UsageError, match="every=0"):
        pl.record(nn.Linear(1, 1), adam(nn.Linear(1, 1)), tmp_path, every=0)


def test_a_run_is_not_compared_with_a_recording_alone(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(pl.UsageError, match="neither a run nor a recording"):
        pl.compare(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "events.jsonl").touch()
    with pytest.raises(pl.UsageError, match="without a recording"):
        pl.compare(tmp_path / "a", tmp_path / "b")


def test_two_ranks_of_ddp_are_one_process_to_rounding(tmp_path: Path) -> None:
    plain(tmp_path / "one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path)]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert num_ranks(tmp_path / "two") == 2
    assert pl.compare(tmp_path / "one", tmp_path / "two").text.startswith(f"rounding: {STEPS} steps")
    found = pl.compare(tmp_path / "one", tmp_path / "alone")
    assert found.first_difference is not None
    assert found.first_difference["step"] == 1
    assert "rank 1 diverges from rank 0 at step 1" in found.text
    assert "data order" not in found.text


@pytest.mark.filterwarnings("ignore")
def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    plain(tmp_path / "a")
    accelerator = accelerate.Accelerator(cpu=True)
    inner = build()
    model, optimizer, loader = accelerator.prepare(inner, adam(inner), batches())
    with pl.record(model, optimizer, tmp_path / "b"):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    assert pl.compare(tmp_path / "a", tmp_path / "b").text.startswith("bitwise")


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    plain(tmp_path / "a")

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def on_train_start(self) -> None:
            self.recorder = pl.record(self.net, self.optimizers(), tmp_path / "b")

        def on_train_end(self) -> None:
            self.recorder.close()

        def training_step(self, batch: Any, index: int) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return adam(self)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(accelerator="cpu", devices=1, max_steps=STEPS, default_root_dir=tmp_path, **quiet).fit(
        Lit(), batches()
    )
    assert pl.compare(tmp_path / "a", tmp_path / "b").text.startswith("bitwise")


@pytest.mark.filterwarnings("ignore")
def test_torchmetrics_have_one_value_for_any_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    job = tmp_path / "job.py"
    job.write_text(METRICS_JOB)
    found = []
    for ranks in (1, 3):
        run = tmp_path / f"run-{ranks}"
        words = ["train", str(job), "--ranks", str(ranks), "--run-dir", str(run), "--train.steps", "2", "--train.exact"]
        done = subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        found.append([event["metrics"] for event in events if event["event"] == "EvalDone"])
    assert found[0] == found[1]
    assert {"accuracy", "auroc", "each/0", "each/1", "each/2", "both/f1"} <= set(found[0][0])


METRICS_JOB = """
import torch, torch.nn.functional as F, torchmetrics.classification as tm, torchmetrics, paceline as pl
from torch import nn

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
data = [(row, int(row[0] > 0) + int(row[1] > 0)) for row in x]

def make_job():
    return pl.Job(
        model=lambda: nn.Linear(8, 3), train_data=data, eval_data=data[:2], global_batch_size=16,
        loss=lambda out, b: (F.cross_entropy(out, b[1], reduction="sum"), len(b[1])),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        metrics={"accuracy": tm.MulticlassAccuracy(3), "auroc": tm.MulticlassAUROC(3), "each": tm.MulticlassRecall(3, average=None),
                 "both": torchmetrics.MetricCollection({"f1": tm.MulticlassF1Score(3)})},
    )
"""


def rank_of_ddp(folder: Path) -> None:
    """One of two ranks: a right run, then one that forgets to reduce."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for name, wrapped in (("two", True), ("alone", False)):
        inner = build()
        model = nn.parallel.DistributedDataParallel(inner) if wrapped else inner
        optimizer = adam(model)
        with pl.record(model, optimizer, folder / name) as recorder:
            for x, y in batches():
                mine = slice(rank, None, 2)
                recorder.batch(x[mine])
                optimizer.zero_grad()
                F.cross_entropy(model(x[mine]), y[mine]).backward()
                optimizer.step()
    torch.distributed.destroy_process_group()
    os._exit(
        0
    )  # DDP keeps its group and gloo's threads: one can end the interpreter's exit with SIGABRT (torch PR 179291)


if __name__ == "__main__":
    rank_of_ddp(Path(sys.argv[1]))
