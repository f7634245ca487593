"""Each line of the table of backends is tried, and so is the rule that chooses a backend."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paceline.launch.launcher import LaunchRequest, start
from paceline.planner.layout.execution_plan import JobFacts, Resources, choose_backend
from paceline.profiling.backends import available_backends
from paceline.run_folder.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Ability:
    """An operation, with the device types on which each backend supports it."""

    operation: str
    gloo: frozenset[str]
    nccl: frozenset[str]


CPU, GPU, BOTH = frozenset({"cpu"}), frozenset({"cuda"}), frozenset({"cpu", "cuda"})
ABILITIES = (
    Ability(operation="send and receive", gloo=CPU, nccl=GPU),
    Ability(operation="broadcast", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce of int64", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce of bf16", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce, maximum", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce, average", gloo=CPU, nccl=GPU),
    Ability(operation="reduce", gloo=CPU, nccl=GPU),
    Ability(operation="all_gather", gloo=CPU, nccl=GPU),
    Ability(operation="gather", gloo=CPU, nccl=GPU),
    Ability(operation="scatter", gloo=CPU, nccl=GPU),
    Ability(operation="reduce_scatter", gloo=CPU, nccl=GPU),
    Ability(operation="all_to_all", gloo=CPU, nccl=GPU),
    Ability(operation="barrier", gloo=CPU, nccl=GPU),
)

WORKER = """
import json, os
from pathlib import Path
import torch
import torch.distributed as dist
from paceline.comm.process_group import LaunchInfo, World


def tries(rank, device):
    def ones(dtype=torch.float32, n=4): return torch.full((n,), rank + 1, dtype=dtype, device=device)
    def both(n=4): return [torch.zeros(n, device=device) for _ in range(2)]
    def send():
        value = ones()
        dist.send(value, dst=1) if rank == 0 else dist.recv(value, src=0)
        return value, 1.0
    def broadcast():
        value = ones(); dist.broadcast(value, src=1); return value, 2.0
    def reduce_all(dtype=torch.float32, op=dist.ReduceOp.SUM, expected=3.0):
        value = ones(dtype); dist.all_reduce(value, op=op); return value.float(), expected
    def reduce():
        value = ones(); dist.reduce(value, dst=0); return (value, 3.0) if rank == 0 else (torch.ones(1), 1.0)
    def all_gather():
        parts = both(); dist.all_gather(parts, ones()); return torch.cat(parts).mean(), 1.5
    def gather():
        parts = both() if rank == 0 else None
        dist.gather(ones(), parts, dst=0)
        return (torch.cat(parts).mean(), 1.5) if rank == 0 else (torch.ones(1), 1.0)
    def scatter():
        value = ones(); dist.scatter(value, [ones() * 5, ones() * 7] if rank == 0 else None, src=0)
        return value, (5.0, 7.0)[rank]
    def reduce_scatter():
        value = ones(); dist.reduce_scatter_tensor(value, ones(n=8)); return value, 3.0
    def all_to_all():
        value = ones(n=2); dist.all_to_all_single(value, ones(n=2)); return value.mean(), 1.5
    def barrier():
        dist.barrier(); return torch.ones(1), 1.0
    return {
        "send and receive": send, "broadcast": broadcast, "all_reduce": reduce_all,
        "all_reduce of int64": lambda: reduce_all(torch.int64), "all_reduce of bf16": lambda: reduce_all(torch.bfloat16),
        "all_reduce, maximum": lambda: reduce_all(op=dist.ReduceOp.MAX, expected=2.0),
        "all_reduce, average": lambda: reduce_all(op=dist.ReduceOp.AVG, expected=1.5),
        "reduce": reduce, "all_gather": all_gather, "gather": gather, "scatter": scatter,
        "reduce_scatter": reduce_scatter, "all_to_all": all_to_all, "barrier": barrier,
    }


def run(payload):
    backend, device = payload["backend"], payload["device"]
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type=device, backend=backend, timeout_seconds=30)
    found = {}
    for name, attempt in tries(world.rank, world.device).items():
        try:
            value, expected = attempt()
            found[name] = bool((value == expected).all())
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
    Path(payload["answer"] + str(world.rank)).write_text(json.dumps(found))
    world.close()
    return 0
"""


def _cases() -> list[tuple[str, str]]:
    gpus = torch.cuda.device_count()
    return [("gloo", "cpu"), *([("gloo", "cuda"), ("nccl", "cuda")] if gpus > 1 else [])]


@pytest.mark.parametrize(("backend", "device"), _cases())
def test_each_backend_can_do_what_the_table_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    (tmp_path / "tries.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(p for p in sys.path if p)}")
    payload = {"backend": backend, "device": device, "answer": str(tmp_path / "answer")}
    outcome = start(LaunchRequest(ranks=2, run=RunFolder(tmp_path / "run"), entry="tries:run", payload=payload))
    assert outcome.exit_code == 0, outcome.failure
    for rank in range(2):
        found = json.loads((tmp_path / f"answer{rank}").read_text())
        assert {name for name, worked in found.items() if worked is True} == {
            ability.operation for ability in ABILITIES if device in getattr(ability, backend)
        }, found


def test_the_documented_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    for ability in ABILITIES:
        gloo, nccl = (", ".join(sorted(devices)) for devices in (ability.gloo, ability.nccl))
        assert f"| {ability.operation} | {gloo} | {nccl} |".replace("|  |", "| |") in text


@pytest.mark.parametrize(
    ("ranks", "device", "asked", "has", "backend", "word"),
    [
        (1, "cpu", "auto", ("gloo",), "none", "one process"),
        (2, "cpu", "auto", ("gloo",), "gloo", "CPUs"),
        (2, "cuda", "auto", ("nccl", "gloo"), "nccl", "GPU"),
        (2, "cuda", "auto", ("gloo",), "gloo", "no nccl"),
        (2, "cuda", "gloo", ("nccl", "gloo"), "gloo", "asks for it"),
    ],
)
def test_the_rule(ranks: int, device: str, asked: str, has: tuple[str, ...], backend: str, word: str) -> None:
    problems: list[object] = []
    facts = JobFacts(global_batch_size=8, backend=asked, built_in_backends=has)
    found, why = choose_backend(Resources(ranks=ranks, device=device), facts, problems)  # type: ignore[arg-type]
    assert (found, problems) == (backend, []) and word in why


@pytest.mark.parametrize(("asked", "word"), [("mpi", "has no backend mpi"), ("nccl", "can't send")])
def test_what_is_not_there_is_refused(asked: str, word: str) -> None:
    problems: list[Exception] = []
    facts = JobFacts(global_batch_size=8, backend=asked, built_in_backends=("nccl", "gloo"))
    choose_backend(Resources(ranks=2, device="cpu"), facts, problems)  # type: ignore[arg-type]
    assert word in str(problems[0])


def test_this_build_has_gloo() -> None:
    assert "gloo" in available_backends()
