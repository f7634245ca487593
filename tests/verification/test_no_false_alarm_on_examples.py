"""No false alarm: verify finds DDP equal to one process on every example and in every awkward setting.

`pytest -m soak -s tests/verification/test_no_false_alarm_on_examples.py` prints a line per case.
"""

from dataclasses import dataclass

import pytest

from tests.conftest import SMALL_JOB, Shop
from tests.verification.diagnosis.fault_in_example import EXAMPLES, SMALL

EQUAL = ("bitwise", "rounding")
MASKED = """

_loss = loss

def loss(logits, batch):  # spaces are not predicted
    targets = batch[-1].flatten()
    kept = targets != 32
    return F.cross_entropy(logits.flatten(0, 1)[kept], targets[kept], reduction="sum"), kept.sum()
"""
TWO_TERMS = """

def loss(logits, batch):
    token = F.cross_entropy(logits.flatten(0, 1), batch[-1].flatten(), reduction="sum")
    return {"token": (token, batch[-1].numel()), "size": (logits.logsumexp(-1).square().sum() * 1e-3, len(logits))}

_plain = make_job

def make_job(width: int = 128, depth: int = 3, context: int = 64):
    from dataclasses import replace

    def count(batch):
        return {"token": batch[-1].numel(), "size": len(batch[-1])}

    return replace(_plain(width=width, depth=depth, context=context), loss=loss, count=count, metrics=None, best=None)
"""
HF_MASKED = """

_item = Bytes.__getitem__

def item(self, index):
    found = _item(self, index)
    labels = found["labels"].clone()
    labels[labels == 32] = -100
    return {**found, "labels": labels[: len(labels)]}

Bytes.__getitem__ = item
"""
NAMED_GROUPS = """

def optimizer(named):
    norms = [p for name, p in named if "norm" in name or name.endswith("bias")]
    rest = [p for name, p in named if not ("norm" in name or name.endswith("bias"))]
    groups = [{"params": rest, "weight_decay": 0.1, "lr": 1e-3}, {"params": norms, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups)

_ungrouped = make_job
import functools
from dataclasses import replace as _replace

@functools.wraps(_ungrouped)
def make_job(*args, **kw):
    return _replace(_ungrouped(*args, **kw), optimizer=optimizer)
"""
SHORT_DIGITS = """

_read = read_digits

def read_digits():
    train, held_out = _read()
    return TensorDataset(*train[:SAMPLES]), held_out
"""
SHORT_TEXT = """

Windows.__len__ = lambda self: min(self.count, SAMPLES)
"""
SHORT_HF = """

Bytes.__len__ = lambda self: SAMPLES
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, a number of ranks, and the settings that make it awkward."""

    name: str
    example: str
    ranks: int
    code: str = ""
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.example}, {self.ranks} ranks, {self.name}"


def _short(example: str, samples: int) -> str:
    code = {"text": SHORT_TEXT, "digits_cnn": SHORT_DIGITS, "hf_llama": SHORT_HF}[example]
    return code.replace("SAMPLES", str(samples))


def _cases() -> list[Case]:
    found = []
    batch = {"text": 32, "digits_cnn": 64, "hf_llama": 32}
    for example, size in batch.items():
        for ranks in (2, 3, 4):
            found.append(Case(name="plain", example=example, ranks=ranks))
            found.append(
                Case(name="accumulation", example=example, ranks=ranks, words=("--train.micro_batch_size", "3"))
            )
        for ranks, left in ((2, 1), (3, 2), (4, 1), (4, 7)):
            found.append(
                Case(name=f"last batch of {left}", example=example, ranks=ranks, code=_short(example, size + left))
            )
        for workers, ranks in ((1, 2), (4, 3)):
            found.append(
                Case(
                    name=f"{workers} data workers", example=example, ranks=ranks, words=("--data.workers", str(workers))
                )
            )
        found.append(Case(name="two named groups", example=example, ranks=3, code=NAMED_GROUPS))
    for ranks in (2, 3, 4):
        sync = ("--train.buffers", "sync_bn")
        found.append(Case(name="sync_bn", example="digits_cnn", ranks=ranks, words=sync))
        found.append(Case(name="two terms", example="text", ranks=ranks, code=TWO_TERMS))
        found.append(Case(name="masked", example="text", ranks=ranks, code=MASKED))
        found.append(Case(name="masked", example="hf_llama", ranks=ranks, code=HF_MASKED))
    sync_accumulated = ("--train.buffers", "sync_bn", "--train.micro_batch_size", "7")
    found.append(Case(name="sync_bn, accumulation", example="digits_cnn", ranks=3, words=sync_accumulated))
    dropout = ("--job.dropout", "0.2", "--train.micro_batch_size", "5")
    found.append(Case(name="dropout, accumulation", example="text", ranks=3, words=dropout))
    everything = ("--train.micro_batch_size", "3", "--data.workers", "1")
    found.append(Case(name="masked, accumulation, workers", example="text", ranks=4, code=MASKED, words=everything))
    words = ("--job.samples", "25", "--job.two_terms", "true", "--job.norm", "true", "--job.dropout", "0.2")
    found.append(Case(name="two terms, BatchNorm, dropout, last batch of 1", example="small", ranks=4, words=words))
    return found


@pytest.mark.soak
@pytest.mark.parametrize("case", _cases(), ids=str)
def test_ddp_is_the_same_training(shop: Shop, case: Case) -> None:
    plain = SMALL_JOB if case.example == "small" else (EXAMPLES / f"{case.example}.py").read_text()
    shop.write("job.py", plain + case.code)
    small = SMALL.get(case.example, ())
    ended = shop.run("verify", "job.py", "--layout", "ddp", "--ranks", str(case.ranks), "--json", *small, *case.words)
    assert ended.code == 0, f"{case}: {ended.text[-3000:]}"
    answer = ended.json()
    floors = answer["noise_floor"]
    print(f"\n{case!s:<70} {answer['verdict']:<9} apart {answer['max_difference']:.1e}  floor {floors:.1e}", end="")
    assert answer["verdict"] in EQUAL
    assert answer["first_difference"] is None
