"""A run saved in one layout resumes in another: the same samples, the same loss, the same update to rounding."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.commands import ckpt
from paceline.launch.launch_environment import KERNELS_VARIABLE
from tests.conftest import Shop

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {  # by name: ranks, and the words
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "zero1": (2, "zero1"),
    "zero2": (2, "zero2"),
    "fsdp": (2, "fsdp"),
    "tp": (2, "tp=2"),
    "pp": (2, "pp=2"),
    "hsdp": (4, "dp_replicate=2,dp_shard=2"),
    "fsdp-tp": (4, "dp_shard=2,tp=2"),
    "fsdp-pp": (4, "dp_shard=2,pp=2"),
    "tp-pp": (4, "tp=2,pp=2"),
    "zero1-tp": (4, "dp_shard=2,tp=2,zero=1"),
    "ddp-pp": (4, "dp=2,pp=2"),
    "cp": (2, "cp=2"),
    "ddp-cp": (4, "dp=2,cp=2"),
    "fsdp-cp": (4, "dp_shard=2,cp=2"),
    "zero1-cp": (4, "dp_shard=2,cp=2,zero=1"),
    "pp-cp": (4, "pp=2,cp=2"),
    "ep": (2, "dp=2,ep=2"),
    "fsdp-ep": (2, "dp_shard=2,ep=2"),
    "zero1-ep": (2, "dp_shard=2,ep=2,zero=1"),
    "hsdp-ep": (4, "dp_replicate=2,dp_shard=2,ep=2"),
    "pp-ep": (4, "dp=2,pp=2,ep=2"),
    "tp-ep": (4, "dp=2,ep=2,tp=2"),
    "cp-ep": (4, "dp_shard=2,ep=2,cp=2"),
}
TIED = {"nano": {"fsdp-pp": "dp_shard=2,pp=2,zero=2"}}  # what two modules use can't be gathered inside a stage
CUT = [name for name in LAYOUTS if name.endswith("cp")]  # sequences: not of `nano`, whose attention is written out
SPREAD = [name for name in LAYOUTS if name.endswith("ep")]  # experts: of `mixtral` alone
NAMES = [name for name in LAYOUTS if name not in (*CUT, *SPREAD)]
SOME = [("fsdp", "pp")]
MANY = [(a, NAMES[(i + k) % len(NAMES)]) for i, a in enumerate(NAMES) for k in (1, 3, 7)]


def both_ways(new: Sequence[str], old: Sequence[str]) -> list[tuple[str, str]]:
    """From each of `new` to each of `old` and back, and among `new` each to its next."""
    among = [(a, new[(i + 1) % len(new)]) for i, a in enumerate(new)]
    return [*among, *((a, b) for a in new for b in old), *((b, a) for a in new for b in old)]


WITH_CUT = both_ways(CUT, ["single", "tp", "pp", "fsdp", "zero2"])
WITH_SPREAD = both_ways(SPREAD, ["single", "ddp", "fsdp", "tp", "pp", "cp"])


def played(folder: Path, ranks: int, cases: Sequence[Sequence[Any]], *, exact: bool = False) -> None:
    environ = {**Shop.environ({"OMP_NUM_THREADS": "1"}), "GLOO_SOCKET_IFNAME": "lo"}
    environ |= {KERNELS_VARIABLE: "AVX2"} if exact else {}
    command = [sys.executable, "-m", "tests.trainer.layout_run_ranks", str(ranks), str(folder), json.dumps(list(cases))]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def resumed(folder: Path, pairs: Sequence[tuple[str, str]], *, job: str) -> None:
    """Every run is one of three steps; the second of a pair begins where the first had made two."""
    words = {name: TIED.get(job, {}).get(name, text) for name, (_, text) in LAYOUTS.items()}
    path = f"tests/zoo.py:{job}"
    for ranks in (1, 2, 4):
        first = [[a, words[a], "", path] for a in dict.fromkeys(a for a, _ in pairs) if LAYOUTS[a][0] == ranks]
        if first:
            played(folder, ranks, first)
    for ranks in (1, 2, 4):
        second = [
            [f"{a}--{b}", words[b], str(folder / a / "checkpoints" / "step-00000002"), path]
            for a, b in pairs
            if LAYOUTS[b][0] == ranks
        ]
        if second:
            played(folder, ranks, second)


def check(folder: Path, a: str, b: str) -> None:
    run, other = folder / a, folder / f"{a}--{b}"
    undisturbed, went_on = (json.loads((path / "answer.json").read_text()) for path in (run, other))
    assert went_on["begun"] == 16 and went_on["samples"] == undisturbed["samples"] == 24
    assert went_on["losses"] == pytest.approx(undisturbed["losses"][2:], rel=2e-6), (a, b)
    if not (run / "before").exists():
        ckpt.consolidate(str(run / "checkpoints" / "step-00000002"), to=run / "before")
    before, right, found = (weights(path) for path in (run / "before", run / "consolidated", other / "consolidated"))
    assert torch.linalg.vector_norm(right - found) < 2e-3 * torch.linalg.vector_norm(right - before), (a, b)
    assert ckpt.verify_checkpoint(str(other)).good


def weights(folder: Path) -> Tensor:
    found = load_file(folder / "model.safetensors")
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


def test_a_run_goes_on_under_another_layout_and_another_number_of_ranks(tmp_path: Path) -> None:
    resumed(tmp_path, SOME, job="nano")
    for a, b in SOME:
        check(tmp_path, a, b)


@pytest.mark.soak
@pytest.mark.parametrize("job", ["nano", "llama"])
def test_a_run_goes_on_under_any_other_layout(tmp_path: Path, job: str) -> None:
    resumed(tmp_path, MANY, job=job)
    for a, b in MANY:
        check(tmp_path, a, b)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("job", "pairs"),
    [("text", WITH_CUT), ("llama", WITH_CUT), ("mixtral", WITH_SPREAD)],
    ids=["cp, text", "cp, llama", "ep, mixtral"],
)
def test_a_run_goes_on_from_and_to_cut_sequences_and_spread_experts(
    tmp_path: Path, job: str, pairs: list[tuple[str, str]]
) -> None:
    resumed(tmp_path, pairs, job=job)
    for a, b in pairs:
        check(tmp_path, a, b)


@pytest.mark.soak
@pytest.mark.parametrize("model", ["text", "llama"])
def test_exact_mode_is_one_digest_where_layout_and_ranks_change_at_every_resume(tmp_path: Path, model: str) -> None:
    job = f"tests/zoo.py:{model}"
    played(tmp_path, 1, [["one", "single", "", job]], exact=True)
    played(tmp_path, 2, [["a", "fsdp", "", job]], exact=True)
    played(tmp_path, 4, [["b", "dp_shard=2,pp=2", str(tmp_path / "a/checkpoints/step-00000001"), job]], exact=True)
    played(tmp_path, 2, [["c", "pp", str(tmp_path / "b/checkpoints/step-00000002"), job]], exact=True)
    digests = {
        name: json.loads((tmp_path / name / "weights.json").read_text())["digest"] for name in ("one", "a", "b", "c")
    }
    assert len(set(digests.values())) == 1, digests
