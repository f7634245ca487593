"""Compare a run's first steps with its forecast: the highest peak memory of a rank, and the seconds per step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

import torch

from paceline.events import EventBus, ForecastChecked
from paceline.launch.failures.oom_detection import process_memory
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.profiling.calibration_store import record_forecast_ratio
from paceline.profiling.cpu_contention import CpuTimes, cpu_contention, read_cpu_times
from paceline.profiling.machine_benchmarks.benchmark_cache import machine_fingerprint
from paceline.trainer.diagnostics.memory_report import MemoryBaseline
from paceline.trainer.setup.build_training_setup import TrainingSetup

_NUM_STEPS = 10  # after this many steps, the comparison is made
MIN_COMPARABLE_BYTES = 512 << 20  # below this, libraries and allocator dominate the resident memory
_NUM_WARMUP_STEPS = 2  # left out of the median step time
_MIN_STEP_SECONDS = 0.02  # shorter forecast steps are mostly overhead, and say nothing about longer ones


class ForecastCheck:
    """A comparison of a run's first steps with its forecast, if the run has one. All ranks make the same calls."""

    def __init__(
        self,
        *,
        forecast: LayoutForecast | None,
        setup: TrainingSetup,
        memory_baseline: MemoryBaseline,
        event_bus: EventBus,
    ) -> None:
        self._forecast = forecast
        self._setup = setup
        self._memory_baseline = memory_baseline
        self._event_bus = event_bus
        self._on_gpu = setup.world.device.type == "cuda"
        self._times: list[Any] = []  # (start, end) of each step, as seconds or as CUDA events
        self._start_cpu_times: CpuTimes | None = None
        self._report: ForecastChecked | None = None

    @property
    def is_on(self) -> bool:
        """True if there is a forecast to compare with."""
        return self._forecast is not None

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Return a context that times one step. On a GPU it uses CUDA events, so that the host does not wait."""
        if self._forecast is None or self._report is not None:
            yield
            return
        if not self._times and not self._on_gpu:
            self._start_cpu_times = read_cpu_times()
        start = self._record_time()
        yield
        self._times.append((start, self._record_time()))

    def report_when_ready(self, *, step: int, is_last_step: bool) -> None:
        """Emit the comparison once, as soon as enough steps have run or the run is over."""
        if self._forecast is None or self._report is not None or not (len(self._times) >= _NUM_STEPS or is_last_step):
            return
        cpu_times = (
            None if self._start_cpu_times is None else vars(read_cpu_times().difference_from(self._start_cpu_times))
        )
        by_rank = self._setup.world.gather_json([self._peak_bytes(), self._seconds(), cpu_times])
        peaks = [peak for peak, _, _ in by_rank if peak is not None]
        forecast, seconds = self._forecast, max(seconds for _, seconds, _ in by_rank)
        measured_bytes = max(peaks) if len(peaks) == len(by_rank) else None
        is_comparable = measured_bytes is not None and (self._on_gpu or forecast.peak_bytes >= MIN_COMPARABLE_BYTES)
        self._report = ForecastChecked(
            step=step,
            layout=forecast.layout,
            source=forecast.source,
            peak_bytes=forecast.peak_bytes,
            parts=dict(forecast.parts),
            step_seconds=forecast.step_seconds,
            measured_bytes=measured_bytes,
            measured_by="allocator" if self._on_gpu else "resident memory",
            measured_seconds=seconds,
            memory_ratio=measured_bytes / forecast.peak_bytes if is_comparable and measured_bytes is not None else None,
            time_ratio=seconds / max(forecast.step_seconds, 1e-9),
            others=cpu_contention([CpuTimes(**rank_times) for _, _, rank_times in by_rank if rank_times is not None]),
        )
        self._event_bus.emit(self._report)

    def store_ratios(self) -> None:
        """Store the measured ratios for this machine's next plan, relative to the uncorrected forecast."""
        report, forecast, plan = self._report, self._forecast, self._setup.plan
        if report is None or forecast is None or not self._setup.world.is_main:
            return
        with suppress(OSError, RuntimeError):
            machine = machine_fingerprint(ranks=plan.mesh.ranks, device=plan.device)
            if machine.threads != plan.threads:
                return
            is_time_reliable = not report.others and forecast.step_seconds / forecast.longer >= _MIN_STEP_SECONDS
            # The calibration's keys `longer` and `fuller` are the ratios of measured to forecast time and memory.
            record_forecast_ratio(
                machine,
                forecast.family,
                longer=report.time_ratio * forecast.longer if is_time_reliable else None,
                fuller=None if report.memory_ratio is None else report.memory_ratio * forecast.fuller,
            )

    def _record_time(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self) -> float:
        """Return the median step time without the warm-up steps."""
        num_warmup = _NUM_WARMUP_STEPS if len(self._times) > 2 * _NUM_WARMUP_STEPS else int(len(self._times) > 1)
        if self._on_gpu:
            torch.cuda.synchronize(self._setup.world.device)
            return float(median(start.elapsed_time(end) / 1e3 for start, end in self._times[num_warmup:]))
        return float(median(end - start for start, end in self._times[num_warmup:]))

    def _peak_bytes(self) -> int | None:
        """Return the allocator's peak on a GPU, or the growth of the process since before the build on a CPU.

        On a CPU, return None if the peak of resident memory has not grown since the end of the build.
        """
        if self._on_gpu:
            return int(torch.cuda.max_memory_allocated(self._setup.world.device))
        peak, baseline = process_memory("VmHWM"), self._memory_baseline.used_bytes
        return peak - baseline["VmRSS"] if peak > baseline["VmHWM"] else None
