"""A comparison of a run's first steps with its forecast: peak bytes of the fullest rank, and seconds per step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

import torch

from paceline.events import EventBus, ForecastChecked
from paceline.launch.failures.oom_detection import process_memory
from paceline.planner.search.layout_with_forecast import FallbackLayout
from paceline.profiling.calibration_store import record_forecast_ratio
from paceline.profiling.cpu_contention import CpuTimes, cpu_contention, read_cpu_times
from paceline.profiling.machine_benchmarks.benchmark_cache import fingerprint
from paceline.trainer.diagnostics.memory_report import MemoryBaseline
from paceline.trainer.setup.build_training_setup import TrainingSetup

STEPS = 10
COMPARABLE = 512 << 20  # below this, libraries and allocator dominate the resident memory
_WARM = 2
_LEAST_SECONDS = 0.02  # shorter forecast steps are mostly overhead, and say nothing about longer ones


class ForecastCheck:
    """A comparison of the first steps with the forecast, if there is one. All ranks make the same calls."""

    def __init__(
        self, *, forecast: FallbackLayout | None, built: TrainingSetup, before: MemoryBaseline, event_bus: EventBus
    ) -> None:
        self._forecast = forecast
        self._built = built
        self._before = before
        self._event_bus = event_bus
        self._on_gpu = built.world.device.type == "cuda"
        self._times: list[Any] = []
        self._looked: CpuTimes | None = None
        self._told: ForecastChecked | None = None

    @property
    def is_on(self) -> bool:
        """True if there is a forecast to compare with."""
        return self._forecast is not None

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time one step; on a GPU with CUDA events, so that nothing synchronises."""
        if self._forecast is None or self._told is not None:
            yield
            return
        if not self._times and not self._on_gpu:
            self._looked = read_cpu_times()
        began = self._mark()
        yield
        self._times.append((began, self._mark()))

    def report_when_ready(self, *, step: int, over: bool) -> None:
        """Report the comparison once enough steps have run, or the run is over."""
        if self._forecast is None or self._told is not None or not (len(self._times) >= STEPS or over):
            return
        own = None if self._looked is None else vars(read_cpu_times().since(self._looked))
        told = self._built.world.gather_json([self._peak_bytes(), self._seconds(), own])
        peaks = [peak for peak, _, _ in told if peak is not None]
        forecast, seconds = self._forecast, max(seconds for _, seconds, _ in told)
        measured = max(peaks) if len(peaks) == len(told) else None
        compares = measured is not None and (self._on_gpu or forecast.peak_bytes >= COMPARABLE)
        self._told = ForecastChecked(
            step=step,
            layout=forecast.layout,
            source=forecast.source,
            peak_bytes=forecast.peak_bytes,
            parts=dict(forecast.parts),
            step_seconds=forecast.step_seconds,
            measured_bytes=measured,
            measured_by="allocator" if self._on_gpu else "resident memory",
            measured_seconds=seconds,
            memory_ratio=measured / forecast.peak_bytes if compares and measured is not None else None,
            time_ratio=seconds / max(forecast.step_seconds, 1e-9),
            others=cpu_contention([CpuTimes(**seen) for _, _, seen in told if seen is not None]),
        )
        self._event_bus.emit(self._told)

    def remember(self) -> None:
        """Store the measured ratios for this machine's next plan, relative to the uncorrected forecast."""
        told, forecast, plan = self._told, self._forecast, self._built.plan
        if told is None or forecast is None or not self._built.world.is_main:
            return
        with suppress(OSError, RuntimeError):
            mark = fingerprint(ranks=plan.mesh.ranks, device=plan.device)
            if mark.threads != plan.threads:
                return
            tells = not told.others and forecast.step_seconds / forecast.longer >= _LEAST_SECONDS
            fuller = None if told.memory_ratio is None else told.memory_ratio * forecast.fuller
            record_forecast_ratio(
                mark, forecast.family, longer=told.time_ratio * forecast.longer if tells else None, fuller=fuller
            )

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self) -> float:
        """Return the median step time without the warm-up steps."""
        warm = _WARM if len(self._times) > 2 * _WARM else int(len(self._times) > 1)
        if self._on_gpu:
            torch.cuda.synchronize(self._built.world.device)
            return float(median(began.elapsed_time(ended) / 1e3 for began, ended in self._times[warm:]))
        return float(median(ended - began for began, ended in self._times[warm:]))

    def _peak_bytes(self) -> int | None:
        """Return the allocator's peak on a GPU; on a CPU the process's growth since before the model was built.

        None on a CPU if the process used more memory before the model was built.
        """
        if self._on_gpu:
            return int(torch.cuda.max_memory_allocated(self._built.world.device))
        most, first = process_memory("VmHWM"), self._before.used_bytes
        return most - first["VmRSS"] if most > first["VmHWM"] else None
