"""The table of convolution workspaces against the allocator's count of single calls."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.memory.allocator import read_events
from torch.profiler import ProfilerActivity, profile

from paceline.profiling.cpu_workspace.operator_workspace import peak_operator_bytes

FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
NEAR = 0.06

needs_table = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2") or not torch.backends.mkldnn.is_available(),
    reason="the table is of processors with AVX-512 or AVX2",
)
needs_bfloat16 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX512" and not torch.cpu._is_avx512_bf16_supported(),
    reason="of those with AVX-512 the table is of such as have products of bfloat16",
)

# source, weight, and what differs from one step without padding
CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((8, 32, 48, 48), (64, 32, 3, 3), {"padding": 1}),
    ((8, 32, 48, 48), (32, 32, 3, 3), {"padding": 1}),
    ((8, 24, 64, 64), (24, 24, 3, 3), {"padding": 1}),
    ((8, 24, 64, 64), (48, 24, 3, 3), {"padding": 1}),
    ((8, 20, 64, 64), (44, 20, 3, 3), {"padding": 1}),
    ((8, 32, 32, 32), (32, 32, 5, 5), {"padding": 2}),
    ((8, 32, 32, 32), (32, 32, 3, 3), {"padding": 2, "dilation": 2}),
    ((8, 128, 28, 28), (128, 128, 3, 3), {"padding": 1}),
    ((2, 32, 64, 64), (32, 32, 3, 3), {"padding": 1}),
    ((8, 64, 48, 48), (32, 64, 1, 1), {}),
    ((8, 24, 64, 64), (10, 24, 1, 1), {}),
    ((8, 3, 64, 64), (32, 3, 3, 3), {"padding": 1}),
    ((8, 3, 96, 96), (256, 3, 8, 8), {"stride": 8}),
    ((8, 32, 48, 48), (64, 32, 3, 3), {"padding": 1, "stride": 2}),
    ((8, 32, 48, 48), (64, 32, 1, 1), {"stride": 2}),
    ((8, 64, 48, 48), (64, 64, 7, 7), {"padding": 3, "stride": 2}),
    ((8, 48, 32, 32), (48, 24, 2, 2), {"stride": 2, "transposed": True}),
    ((8, 48, 32, 32), (48, 24, 4, 4), {"padding": 1, "stride": 2, "transposed": True}),
    ((8, 48, 32, 32), (48, 24, 3, 3), {"padding": 1, "transposed": True}),
    ((8, 64, 32, 32), (64, 1, 3, 3), {"padding": 1, "groups": 64}),
    ((8, 64, 32, 32), (64, 16, 3, 3), {"padding": 1, "groups": 4}),
    ((8, 32, 256), (64, 32, 3), {"padding": 1}),
    ((2, 16, 16, 16, 16), (32, 16, 3, 3, 3), {"padding": 1}),
    ((1, 256, 8, 8), (256, 256, 3, 3), {"padding": 1}),
]
IN_FLOAT32: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((8, 3, 96, 96), (256, 3, 16, 16), {"stride": 16}),  # in bfloat16 their forward holds more than the table says
    ((8, 64, 32, 32), (64, 16, 3, 3), {"padding": 1, "groups": 4, "stride": 2}),
]
WAYS = [
    *((*case, torch.float32) for case in [*CASES, *IN_FLOAT32]),
    *(pytest.param(*case, torch.bfloat16, marks=needs_bfloat16) for case in CASES),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def most_bytes(run: Callable[[], Any], *, file: Path) -> int:
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    profiler.export_chrome_trace(str(file))
    del kept
    live = most = 0
    for event in read_events(json.loads(file.read_text(encoding="utf-8"))["traceEvents"]):
        live += event.num_bytes
        most = max(most, live)
    return most


def calls(source: Any, weight: Any, more: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Forward; backward to both; backward to the weights of a first layer."""
    more = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "groups": 1} | more
    each = len(source) - 2
    stride, padding, dilation = ([more[name]] * each for name in ("stride", "padding", "dilation"))
    rest = (stride, padding, dilation, more["transposed"], [0] * each, more["groups"])
    given, weights = torch.randn(source, dtype=dtype), torch.randn(weight, dtype=dtype)
    found = weight[1] * more["groups"] if more["transposed"] else weight[0]
    yield FORWARD, (given, weights, torch.randn(found, dtype=dtype), *rest)
    gradient = torch.randn_like(FORWARD(given, weights, None, *rest))
    for wanted in ([True, True, True], [False, True, True]):
        yield BACKWARD, (gradient, given, weights, [found], *rest, wanted)


@needs_table
@pytest.mark.parametrize(("source", "weight", "more", "dtype"), WAYS, ids=lambda value: str(value).replace(" ", ""))
def test_table_says_what_the_allocator_gave_out(
    source: Any, weight: Any, more: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    for operation, args in calls(source, weight, more, dtype):
        held = most_bytes(partial(operation, *args), file=tmp_path / "events.json")
        said = peak_operator_bytes(operation, args)
        assert said == pytest.approx(held, rel=NEAR), (operation, args[-1])


@needs_table
def test_gradient_that_lies_otherwise_is_copied_first(tmp_path: Path) -> None:
    _, _, (operation, args) = calls((8, 24, 64, 64), (10, 24, 1, 1), {}, torch.float32)
    turned = args[0].contiguous(memory_format=torch.channels_last)
    held = most_bytes(partial(operation, turned, *args[1:]), file=tmp_path / "events.json")
    assert peak_operator_bytes(operation, (turned, *args[1:])) == pytest.approx(held, rel=NEAR)
    assert peak_operator_bytes(operation, args) < held / 2


def test_what_is_not_known_holds_nothing_of_its_own() -> None:
    assert peak_operator_bytes(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2))) == 0
