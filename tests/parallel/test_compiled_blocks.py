"""Blocks compiled one by one give the plain model's numbers within rounding, or run plain and say so."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.activation_checkpointing import parse_remat
from paceline.examples.text import GPT
from paceline.parallel.activation_checkpointing.checkpointing import apply_remat
from paceline.parallel.batchnorm.running_statistics import StatisticsRecorder
from paceline.parallel.compile import compile_blocks
from paceline.torch_internals.private_api import recompile_on_hook_changes
from paceline.torch_internals.rng import RandomStreams
from tests.parallel.activation_checkpointing.test_activation_checkpointing import (
    Images,
    hf,
    hf_loss,
    image_loss,
    text_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore")
CASES: dict[str, Any] = {
    "text": (lambda: GPT(width=32, depth=3, heads=2, context=16, dropout=0.2), text_loss),
    "images": (lambda: Images(counts=False), image_loss),
    "llama": (lambda: hf("llama"), hf_loss),
}


def step(case: str, *, compiled: bool, policy: str = "none") -> tuple[dict[str, Tensor], list[str]]:
    torch._dynamo.reset()
    recompile_on_hook_changes()
    said: list[str] = []
    build, loss = CASES[case]
    torch.manual_seed(3)
    model = build().train()
    streams = RandomStreams(seed=5)
    streams.attach(model)
    tape = StatisticsRecorder(model=model, world=World.alone())
    apply_remat(model, policy=parse_remat(policy))
    if compiled:
        compile_blocks(model, report=said.append)
    for number in range(3):
        tape.begin_step()
        streams.enter(step=number, microbatch=0)
        loss(model, number).backward()
        tape.fold(num_micro=1)
    found = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: value.clone() for name, value in model.state_dict().items()}, said


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The floor is for biases before a norm, whose true gradient is zero."""
    assert one.keys() == other.keys()
    return max(
        float((a.double() - b.double()).abs().max() / (a.double().abs().max() + 1e-2))
        for a, b in ((one[name], other[name]) for name in one)
    )


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_within_rounding(case: str, policy: str) -> None:
    right, _ = step(case, compiled=False)
    found, said = step(case, compiled=True, policy=policy)
    assert len(said) == (0 if policy != "selective" else 3 + (case != "text")) and not any(
        "uncompiled" in s for s in said
    )
    assert apart(right, found) < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_buffer_that_is_read_and_written_keeps_a_block_plain() -> None:
    CASES["counting"] = (Images, image_loss)
    try:
        right, _ = step("counting", compiled=False)
        found, said = step("counting", compiled=True)
    finally:
        del CASES["counting"]
    assert all(torch.equal(right[name], found[name]) for name in right)
    assert len(said) == 4 and said[0].startswith(
        "note: blocks.0 runs uncompiled: its forward writes to the buffer scale"
    )


@pytest.mark.soak
def test_shapes_may_change() -> None:
    torch._dynamo.reset()
    said: list[str] = []
    torch.manual_seed(0)
    model = GPT(width=32, depth=3, heads=2, context=64, dropout=0.0)
    for length in (5, 9, 17, 33, 12):
        ids = torch.randint(0, 256, (2, length))
        right = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        undo = compile_blocks(model, report=said.append)
        model(ids)  # a block's first call is plain
        found = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        undo()
        assert abs(float(right - found)) < 1e-5
    assert said == []


class Failing(nn.Module):
    """Writes a buffer and draws, then meets what the compiler can't do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.linear(x)))


def run_failing(*, compiled: bool) -> tuple[dict[str, Tensor], list[str]]:
    said: list[str] = []
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Failing(), nn.Tanh()) for _ in range(2)))
    if compiled:
        compile_blocks(model, report=said.append)
    x = torch.randn(6, 8)
    for _ in range(3):
        model(x).sum().backward()
    return {
        **dict(model.named_buffers()),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }, said


def test_without_a_compiler_it_runs_plain_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import torch._inductor.config

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/no/compiler"))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    right, _ = run_failing(compiled=False)
    found, said = run_failing(compiled=True)
    assert len(said) == 2
    assert said[0].startswith("note: 0 runs uncompiled: ") and "compiler" in said[0].lower()
    assert all(torch.equal(right[name], found[name]) for name in right)


def test_a_failure_after_half_the_block_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph breaks after statistics were written and numbers drawn; the second half fails."""
    torch._dynamo.reset()
    calls = []

    def second_fails(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        if len(calls) % 2 == 0:
            raise RuntimeError("planted")
        return graph.forward

    plain = Failing.forward

    def broken(self: Failing, x: Tensor) -> Tensor:
        y = plain(self, x)
        torch._dynamo.graph_break()
        return y * 1.0

    compile_plainly = torch.compile
    monkeypatch.setattr(Failing, "forward", broken)
    monkeypatch.setattr(torch, "compile", lambda f, options: compile_plainly(f, backend=second_fails))
    right, _ = run_failing(compiled=False)
    found, said = run_failing(compiled=True)
    assert len(calls) >= 2 and len(said) == 2 and "planted" in said[0]
    assert [name for name in right if not torch.equal(right[name], found[name])] == []
