"""Replicas with compressed gradients: each method against its serial reference, through a stop, and refusals."""

import json
from typing import Any

import pytest

from tests.conftest import Shop
from tests.matrix.matrix_page import patterns, stands

JOB = """
from dataclasses import replace
from functools import partial

import torch, torch.nn as nn
import job as plain
import paceline as pl
from paceline.parallel.data_parallel import reducer as replicate
from paceline.parallel.module_access import parameters as units
from paceline.parallel.compression import codecs as grain
from paceline.parallel.compression import error_feedback_reducer as held
from paceline.parallel.compression import residual_memory as memory
from paceline.trainer.saving import resume_run as saving


class Branched(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.extra = net, nn.Linear(6, 4)

    def forward(self, x):
        found = self.net(x)
        return found + self.extra(x) if x[0, 0] > 0.8 else found


def forgetful(self, gradients):
    for view, gradient in zip(self.next.values(), gradients, strict=True):
        view.copy_(gradient)


def twice(self, gradients):
    corrected(self, gradients)
    self.next_flat.add_(self._flats[0])


def cut_off(self, values):  # the sums, which are one row
    return rounded(self, values if len(values) > 1 else values * (1 - 2.0**-9))


corrected, rounded = memory.DoubleBufferedTensors.add_gradients, grain.Bf16.pack


def small_units():
    units.FIRST_BUCKET_BYTES = 64
    for module in (held, replicate):
        module.make_buckets = partial(units.make_buckets, bucket_bytes=64)


PLANTS = {
    "forgetful": lambda: setattr(memory.DoubleBufferedTensors, "add_gradients", forgetful),
    "scale": lambda: setattr(grain, "_int8_scale", lambda most: torch.empty_like(most, dtype=torch.float32).copy_(most / 126.0)),
    "small units": small_units,
    "twice": lambda: setattr(memory.DoubleBufferedTensors, "add_gradients", twice),
    "cut off": lambda: setattr(grain.Bf16, "pack", cut_off),
    "dropped": lambda: setattr(saving, "load_error_feedback", lambda *_, **__: None),
    "undivided": lambda: setattr(held, "divide_all", lambda *_: None),
}


def make_job(plant: str = "", branch: bool = False, nan: int = -1, two_terms: bool = False,
             dropout: float = 0.0) -> pl.Job:
    PLANTS.get(plant, lambda: None)()
    job = plain.make_job(two_terms=two_terms, dropout=dropout)
    if nan >= 0:
        job.train_data.tensors[0][nan] = float("nan")
    return replace(job, model=lambda: Branched(plain.Net(False, 0.0))) if branch else job
"""
WORDS = ("bf16", "fp16", "int8,block=8", "powersgd,rank=2", "topk,ratio=0.1")
SOME = [*(pytest.param(how, marks=pytest.mark.soak) for how in WORDS[:2]), *WORDS[2:]]
MICRO = ("--train.micro_batch_size", "2")


@pytest.fixture
def bench(shop: Shop) -> Shop:
    shop.write("wire.py", JOB)
    return shop


def verified(bench: Shop, how: str, *words: str, ranks: int = 2, steps: int = 20) -> dict[str, Any]:
    given = ("--ranks", str(ranks), "--steps", str(steps), "--compress", how, "--json", *MICRO)
    ended = bench.run("verify", "wire.py", *given, *words, timeout=400)
    assert ended.code in (0, 4), ended.text
    found: dict[str, Any] = ended.json()
    return found


def assert_same(found: dict[str, Any], how: str) -> None:
    assert found["verdict"] in ("bitwise", "rounding"), json.dumps(found["lines"], indent=1)
    assert found["reference"] == f"serial {how}" and len(found["rungs"]) == 3
    assert all(rung["compared"].get("weights", 0) > 5 for rung in found["rungs"][1:])


@pytest.mark.parametrize("how", SOME)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_each_is_its_serial_reference(bench: Shop, how: str, ranks: int) -> None:
    found = verified(bench, how, ranks=ranks)
    assert_same(found, how)
    if not how.startswith("powersgd"):
        assert found["verdict"] == "bitwise", json.dumps(found["lines"], indent=1)


@pytest.mark.parametrize("how", [WORDS[2], *(pytest.param(how, marks=pytest.mark.soak) for how in WORDS[3:])])
def test_it_does_not_depend_on_how_gradients_are_put_together(bench: Shop, how: str) -> None:
    assert_same(verified(bench, how, "--job.plant", "small units", ranks=3), how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("topk,ratio=0.1", ("--job.branch", "true", "--job.two_terms", "true")),
        pytest.param("powersgd,rank=2", ("--job.branch", "true"), marks=pytest.mark.soak),
        pytest.param("int8,block=8", ("--job.branch", "true", "--job.dropout", "0.2"), marks=pytest.mark.soak),
        pytest.param("fp16", ("--job.two_terms", "true", "--train.precision", "fp16"), marks=pytest.mark.soak),
        pytest.param("topk,ratio=0.1", ("--train.precision", "bf16"), marks=pytest.mark.soak),
        pytest.param("bf16", ("--job.two_terms", "true", "--train.precision", "bf16"), marks=pytest.mark.soak),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_with_branches_that_few_use_and_terms_of_their_own(bench: Shop, how: str, words: tuple[str, ...]) -> None:
    assert_same(verified(bench, how, *words, ranks=3), how)


@pytest.mark.parametrize(
    ("how", "plant"),
    [
        ("topk,ratio=0.1", "forgetful"),
        ("int8,block=8", "scale"),
        ("bf16", "cut off"),
        pytest.param("topk,ratio=0.1", "twice", marks=pytest.mark.soak),
        pytest.param("powersgd,rank=2", "forgetful", marks=pytest.mark.soak),
        pytest.param("topk,ratio=0.1", "undivided", marks=pytest.mark.soak),
    ],
)
def test_a_mistake_in_it_is_another_training(bench: Shop, how: str, plant: str) -> None:
    found = verified(bench, how, "--job.plant", plant)
    assert found["verdict"] == "different"
    assert "feedback lost or counted twice" in found["first_difference"]["cause"]


def train(bench: Shop, run: str, steps: int, how: str, *words: str, ranks: int = 2) -> Any:
    given = ("--ranks", str(ranks), "--run-dir", run, "--train.steps", str(steps), "--compress", how, *MICRO)
    return bench.run("train", "wire.py", *given, *words)


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.soak) for how in WORDS[:4]] + [*WORDS[4:]])
def test_a_stop_changes_no_bit(bench: Shop, how: str) -> None:
    runs = [train(bench, *run, how) for run in (("straight", 11), ("parts", 5), ("parts", 11))]
    assert not any(run.code for run in runs), runs[-1].text
    assert "resumed: step-00000005" in runs[-1].text and f"compress: {how}" in runs[0].text
    assert bench.digest("parts") == bench.digest("straight")
    assert not bench.run("ckpt", "verify", "parts").code


@pytest.mark.soak
def test_without_what_was_held_back_the_bits_are_others(bench: Shop) -> None:
    how = "topk,ratio=0.1"
    runs = [train(bench, "straight", 11, how), train(bench, "parts", 5, how)]
    runs.append(train(bench, "parts", 11, how, "--job.plant", "dropped"))
    assert not any(run.code for run in runs), runs[-1].text
    assert bench.digest("parts") != bench.digest("straight")


@pytest.mark.soak
def test_killed_it_goes_on_with_the_bits_that_it_would_have_had(bench: Shop) -> None:
    how, words = "powersgd,rank=2", ("--checkpoint.every", "3")
    assert not train(bench, "straight", 9, how, *words).code
    killed = train(bench, "killed", 9, how, *words, "--survive.restarts", "0", "--faults", "kill rank=1 step=8")
    assert killed.code == 1 and "--compress powersgd,rank=2" in killed.text, killed.text
    again = train(bench, "killed", 9, how, *words)
    assert again.code == 0 and "resumed: step-00000006" in again.text, again.text
    assert bench.digest("killed") == bench.digest("straight")


@pytest.mark.soak
def test_another_number_of_replicas_goes_on_and_another_method_is_refused(bench: Shop) -> None:
    how = "topk,ratio=0.1"
    assert not train(bench, "run", 4, how).code
    assert not train(bench, "run", 6, how, ranks=3).code
    for other in ("none", "topk,ratio=0.2"):
        ended = train(bench, "run", 8, other)
        assert ended.code == 2 and f"compress: was {how}, is {other}" in ended.text, ended.text
    ended = train(bench, "run", 8, "int8", "--allow", "compress")
    assert ended.code == 0, ended.text
    evaluated = bench.run("evaluate", "run", "--json")
    assert evaluated.code == 0, evaluated.text


def test_a_step_that_is_left_out_leaves_what_is_held_back_as_it_was(bench: Shop) -> None:
    words = ("--job.nan", "17", "--train.on_nonfinite", "skip", "--train.check_every", "1", "--log.every", "1")
    for how in ("topk,ratio=0.1", "powersgd,rank=2"):
        ended = train(bench, how[:4], 12, how, *words)
        assert ended.code == 0, ended.text
        events = [json.loads(line) for line in (bench.path / how[:4] / "events.jsonl").read_text().splitlines()]
        losses = [event["loss"] for event in events if event["event"] == "StepDone"]
        assert losses[-1] < 1.6, losses


COUNTED = """
import json, sys
import paceline as pl
from paceline.profiling.model_tracing.communication_counter import CommunicationCounter
from wire import make_job

if __name__ == "__main__":
    settings = {"train.steps": 2, "train.check_every": 0, "train.micro_batch_size": 2}
    with pl.Run(make_job(), ranks=3, compress=sys.argv[1], run_dir=sys.argv[2], settings=settings) as run:
        for batch in run.batches():
            with CommunicationCounter() as sent:
                run._active_session.setup.step.run(batch)
            break
        if run.rank == 0:
            told = run._active_session.setup.parallelized_model.reducer.sent_bytes(3)
            (run.folder / "counted.json").write_text(json.dumps([told, sent.as_json()]))
        run.stop()
"""


@pytest.mark.parametrize("how", SOME)
def test_the_bytes_that_are_told_are_those_that_are_sent(bench: Shop, how: str) -> None:
    bench.write("counted.py", COUNTED)
    ended = bench.call([*bench.command()[:3], "counted.py", how, "run"])
    assert (bench.path / "run/counted.json").exists(), ended.text
    told, flows = json.loads((bench.path / "run/counted.json").read_text())
    vectors = (6 * 2 + 16) + (6 * 2 + 8)  # flags and losses of a step, and whether forwards changed numbers
    names = 1024 * 2  # of the loss's terms, which the ranks gather in the first step
    joint = vectors * 8 * 2 * 2 / 3 + names  # these are sent in any case
    assert 0 <= sum(flow["sent_bytes"] for flow in flows.values()) - told <= joint, (told, flows)


BAD = {
    "needs ddp, not pp": ("--layout", "pp", "--ranks", "2"),
    "needs ddp, not fsdp": ("--layout", "fsdp", "--ranks", "2"),
    "needs ddp, not threads": ("--layout", "threads", "--ranks", "2"),
    "with one rank: it sends nothing": ("--ranks", "1"),
    "--train.exact with --compress topk": ("--ranks", "2", "--train.exact"),
    "fp16 with --compress topk": ("--ranks", "2", "--train.precision", "fp16"),
    "needs --update sync, not hogwild": ("--ranks", "2", "--update", "hogwild"),
    "did you mean 'topk'": ("--ranks", "2", "--compress", "topkk"),
}


@pytest.mark.parametrize("said", BAD)
def test_what_it_can_not_be_had_with_is_said_before_anything_starts(bench: Shop, said: str) -> None:
    words = ["--compress", "topk", *BAD[said], "--run-dir", "run", "--train.steps", "2", "--dry-run"]
    ended = bench.run("train", "wire.py", *words)
    assert ended.code == 2 and said in ended.text and "Traceback" not in ended.text, ended.text
    refused = ended.text.splitlines()[0].removeprefix("error: ")
    assert "not a compression method" in refused or stands(refused, patterns()), "docs/refusals.md does not have it"


def test_verify_says_where_it_has_no_verdict(bench: Shop) -> None:
    ended = bench.run("verify", "wire.py", "--ranks", "2", "--compress", "bf16", "--train.buffers", "sync_bn")
    assert ended.code == 2 and "no verdict on --compress bf16 with sync_bn" in ended.text, ended.text


@pytest.mark.soak
@pytest.mark.parametrize("how", ["none", "bf16", "fp16", "int8", "powersgd", "topk"])
def test_it_reaches_the_accuracy_of_the_digits_example(shop: Shop, how: str) -> None:
    words = ("--ranks", "2", "--compress", how, "--run-dir", "run")
    ended = shop.run("train", "paceline.examples.digits_cnn", *words, timeout=400)
    assert ended.code == 0, ended.text
    records = [json.loads(line) for line in (shop.path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(record["eval/accuracy"] for record in records if "eval/accuracy" in record) > 0.97


@pytest.mark.soak
@pytest.mark.parametrize("how", ["int8", "topk,ratio=0.02", "powersgd"])
def test_a_llama_is_the_serial_reference(shop: Shop, how: str) -> None:
    words = ("--ranks", "3", "--steps", "6", "--compress", how, "--json")
    ended = shop.run("verify", "paceline.examples.hf_llama", *words, timeout=400)
    assert ended.code == 0 and ended.json()["verdict"] in ("bitwise", "rounding"), ended.text
