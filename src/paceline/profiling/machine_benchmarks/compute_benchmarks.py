"""Time matmuls, attention, memory streams, optimizers and the overhead of calls on each rank's device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.comm.process_group import World
from paceline.planner.hardware.benchmark_results import (
    ATTENTION_FLOPS,
    HEAD_WIDTH,
    TRAINED_ATTENTION_FLOPS,
    MatmulTimings,
    Rates,
)
from paceline.planner.hardware.timing_curve import TimingCurve
from paceline.profiling.machine_benchmarks.interleaved_timer import (
    BenchmarkFamily,
    BenchmarkSize,
    Call,
    Key,
    time_families,
)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NARROW_ROWS = (4, 16, 64, 256, 1024)  # of the first operand of a narrow matmul
_NARROW_RATIO = 8  # the other dimensions of a narrow matmul are at least this many times longer
_MAX_CALL_SECONDS = 0.1  # sizes that take longer are skipped
_CALLS_IN_BUDGET = 100  # how often the slowest kind can be called within the time
_CHAIN_LENGTH = 32  # dependent operations of one element-wise kind, to measure the overhead of a call
_NUM_OPTIMIZER_TENSORS = 8
_ADAMW_BYTES = 28  # per element: AdamW reads parameter, gradient and two moments, and writes all but the gradient
_ROW_ELEMENTS = 512
_ROW_BYTES = 4 * _ROW_ELEMENTS
_MIB = 2**20
_STREAM_BYTES = (2**12, 2**16, 2**18, _MIB, 4 * _MIB, 16 * _MIB, 28 * _MIB, 36 * _MIB, 64 * _MIB)
"""Two sizes are near 32 MiB. Above it, each malloc of glibc gets new pages from the system, which is slower."""
_STREAM_BYTES_GPU = (2**12, 2**16, _MIB, 16 * _MIB, 64 * _MIB, 512 * _MIB)


def measure_compute(world: World, *, num_busy: int, threads: int, seconds: float, shares_cores: bool = False) -> Rates:
    """Return the rates of `num_busy` ranks that compute at the same time with `threads` threads each.

    Each of these ranks calls this. `shares_cores` says that the ranks have more threads than there are cores.
    """
    torch.set_num_threads(threads)
    limit = min(_MAX_CALL_SECONDS, seconds / _CALLS_IN_BUDGET)
    curves = time_families(
        list(_benchmarks(world.device)),
        world=world,
        seconds=seconds,
        max_call_seconds=limit,
        combine_ranks=fmean,
        shares_cores=shares_cores,
    )

    def curves_of_kind(kind: str) -> dict[str, TimingCurve]:
        return {key[1]: curve for key, curve in curves.items() if key[0] == kind}

    return Rates(
        busy=num_busy,
        threads=threads,
        products={name: _matmul_timings(name, curve, curves) for name, curve in curves_of_kind("product").items()},
        attention=curves_of_kind("attention"),
        attention_trained=curves_of_kind("trained"),
        streams=curves_of_kind("stream"),
        optimizers=curves_of_kind("optimizer"),
        operation_seconds=curves["operation", "forward"].points[0].seconds,
        trained_operation_seconds=curves["operation", "trained"].points[0].seconds,
    )


def measure_copies(world: World, *, seconds: float) -> dict[str, TimingCurve]:
    """Return the timings of copies `to_device` and `to_host`, on all ranks at once; empty without a GPU."""
    if world.device.type != "cuda":
        return {}
    sizes = [2**power for power in (12, 16, 20, 24, 28)]
    families = [
        BenchmarkFamily(
            key=(direction,),
            sizes=[
                BenchmarkSize(amount=size, make_call=partial(_copy, direction, size, world.device)) for size in sizes
            ],
        )
        for direction in ("to_device", "to_host")
    ]
    curves = time_families(
        families, world=world, seconds=seconds, max_call_seconds=_MAX_CALL_SECONDS, combine_ranks=fmean
    )
    return {key[0]: curve for key, curve in curves.items()}


def _matmul_timings(precision: str, square: TimingCurve, curves: Mapping[Key, TimingCurve]) -> MatmulTimings:
    """Return the timings of square matmuls, and the ratios of narrow matmuls to a square one with as many FLOPs."""
    narrow = []
    for key, curve in curves.items():
        if key[:2] == ("narrow", precision):
            point = curve.points[0]
            narrow.append((int(key[2]), point.seconds / square.seconds(point.amount)))
    if narrow:
        narrow.append((_NARROW_RATIO * narrow[-1][0], 1.0))
    return MatmulTimings(square=square, narrow=tuple(narrow))


def _benchmarks(device: torch.device) -> Iterator[BenchmarkFamily]:
    """Yield all benchmarks. A key has the kind, the precision or variant and, for narrow matmuls, the rows."""
    is_gpu = device.type == "cuda"
    edge = 4096 if is_gpu else 512
    edges = (256, 512, 1024, 2048, 4096, 8192) if is_gpu else (32, 64, 128, 256, 512, 1024, 2048)
    lengths = (128, 512, 2048, 8192) if is_gpu else (32, 128, 512, 2048)
    for name, dtype in PRECISIONS.items():
        squares = [
            BenchmarkSize(amount=2.0 * n**3, make_call=partial(_linear_layer, n, n, dtype, device), times=3)
            for n in edges
        ]
        yield BenchmarkFamily(key=("product", name), sizes=squares)
        for rows in (number for number in _NARROW_ROWS if _NARROW_RATIO * number <= edge):
            make_call = partial(_linear_layer, rows, edge, dtype, device)
            yield BenchmarkFamily(
                key=("narrow", name, str(rows)),
                sizes=[BenchmarkSize(amount=2.0 * rows * edge**2, make_call=make_call, times=3)],
            )
        for kind, flops_factor in (("attention", ATTENTION_FLOPS), ("trained", TRAINED_ATTENTION_FLOPS)):
            heads = 128 if is_gpu else 4
            sizes = [
                BenchmarkSize(
                    amount=flops_factor * length**2 * HEAD_WIDTH,
                    make_call=partial(_attention, heads, length, dtype, device, trained=kind == "trained"),
                    times=heads,
                )
                for length in lengths
            ]
            yield BenchmarkFamily(key=(kind, name), sizes=sizes)
    yield from _stream_benchmarks(device, sizes=_STREAM_BYTES_GPU if is_gpu else _STREAM_BYTES)
    yield from _optimizer_benchmarks(device, max_elements=2**22 if is_gpu else 2**19)
    for kind in ("forward", "trained"):
        make_chain = partial(_operation_chain, device, trained=kind == "trained")
        yield BenchmarkFamily(
            key=("operation", kind), sizes=[BenchmarkSize(amount=1, make_call=make_chain, times=_CHAIN_LENGTH)]
        )


def _stream_benchmarks(device: torch.device, *, sizes: Sequence[int]) -> Iterator[BenchmarkFamily]:
    buffers: list[Tensor] = []  # two, allocated by the first call; all sizes and kinds share them

    def make_call(kind: Callable[[Tensor, Tensor], object], size: int) -> Call:
        while len(buffers) < 2:
            buffers.append(torch.rand(sizes[-1] // _ROW_BYTES, _ROW_ELEMENTS, device=device))
        first, second = (tensor[: size // _ROW_BYTES] for tensor in buffers)
        return partial(kind, first, second)

    kinds: dict[str, tuple[int, Callable[[Tensor, Tensor], object]]] = {
        "copy": (2, lambda first, second: second.copy_(first)),
        "add": (3, torch.add),
        "gelu": (2, lambda first, _: F.gelu(first)),
        "norm": (2, lambda first, _: F.layer_norm(first, (_ROW_ELEMENTS,))),
    }
    for name, (num_moved, kind) in kinds.items():
        yield BenchmarkFamily(
            key=("stream", name),
            sizes=[BenchmarkSize(amount=num_moved * size, make_call=partial(make_call, kind, size)) for size in sizes],
        )


def _optimizer_benchmarks(device: torch.device, *, max_elements: int) -> Iterator[BenchmarkFamily]:
    elements = [num_elements for num_elements in (2**6, 2**12, 2**16, 2**19, 2**22) if num_elements <= max_elements]
    for name, fused in (("adamw", None), ("adamw fused", True)):
        sizes = [
            BenchmarkSize(
                amount=_ADAMW_BYTES * number,
                make_call=partial(_adamw_step, number, fused, device),
                times=_NUM_OPTIMIZER_TENSORS,
            )
            for number in elements
        ]
        yield BenchmarkFamily(key=("optimizer", name), sizes=sizes)


def _linear_layer(rows: int, edge: int, dtype: torch.dtype, device: torch.device) -> Call:
    """Return a call of the three matmuls of a linear layer: forward, input gradient, weight gradient."""
    x = torch.rand(rows, edge, device=device).to(dtype)
    gradient = torch.rand(rows, edge, device=device).to(dtype)
    weight = torch.rand(edge, edge, device=device).to(dtype)

    def call() -> None:
        F.linear(x, weight)
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    return call


def _attention(heads: int, length: int, dtype: torch.dtype, device: torch.device, *, trained: bool) -> Call:
    query, key, value, gradient = (
        torch.rand(1, heads, length, HEAD_WIDTH, device=device).to(dtype).requires_grad_(trained) for _ in range(4)
    )

    def call() -> None:
        output = F.scaled_dot_product_attention(query, key, value)
        if trained:
            torch.autograd.grad(output, (query, key, value), gradient)

    return call


def _adamw_step(elements: int, fused: bool | None, device: torch.device) -> Call:
    parameters = [torch.nn.Parameter(torch.rand(elements, device=device)) for _ in range(_NUM_OPTIMIZER_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    return torch.optim.AdamW(parameters, fused=fused).step


def _operation_chain(device: torch.device, *, trained: bool) -> Call:
    start = torch.rand(16, device=device, requires_grad=trained)
    factor, gradient = torch.ones(16, device=device), torch.ones(16, device=device)

    def call() -> None:
        end = start
        for _ in range(_CHAIN_LENGTH):
            end = end * factor
        if trained:
            torch.autograd.grad(end, start, gradient)

    return call


def _copy(direction: str, size: int, device: torch.device) -> Call:
    host_tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device_tensor = torch.empty(size, dtype=torch.uint8, device=device)
    if direction == "to_device":
        return partial(device_tensor.copy_, host_tensor, non_blocking=True)
    return partial(host_tensor.copy_, device_tensor, non_blocking=True)
