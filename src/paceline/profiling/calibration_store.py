"""The calibration store of a machine: stored plans, timed steps, and the ratios of measured runs to their forecasts.

There are two kinds of ratios: `longer` is the measured step time divided by its forecast, and `fuller` is the measured
memory divided by its forecast.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from paceline.config.job_reference import parse_jobref
from paceline.filesystem.atomic_files import read_json, write_json
from paceline.planner.hardware.benchmark_results import MachineFingerprint
from paceline.profiling.machine_benchmarks.benchmark_cache import cache_file, cache_folder

_MAX_RUNS = 5  # per family and kind; older ones are dropped
_OTHER_FAMILIES = ""  # the key of the ratio for families without runs


def plan_key(
    job: str, *, settings: Mapping[str, Any], precision: str, global_batch_size: int, compiles: bool = False
) -> str:
    """Return a hash of the job's file (or module name), its parameters, and the settings that change its profile."""
    ref = parse_jobref(job)
    text = ref.path.read_bytes() if ref.path is not None else str(ref.module).encode()
    job_settings = {name: str(value) for name, value in sorted(settings.items()) if name.startswith("job.")}
    profile_inputs = json.dumps(
        [ref.name, job_settings, precision, global_batch_size, *(["compiled"] if compiles else [])]
    )
    return hashlib.sha256(text + profile_inputs.encode()).hexdigest()[:16]


def save_plan(key: str, plan: Mapping[str, Any]) -> None:
    """Store a plan for later runs of the job. Store nothing if the folder can't be written."""
    _write(_plan_file(key), plan)


def read_stored_plan(key: str) -> Any:
    """Return the stored plan, or None."""
    return _read(_plan_file(key))


def save_timings(key: str, timings: Mapping[str, Any]) -> None:
    """Store the timings of layouts on this machine. Store nothing if the folder can't be written."""
    _write(_timings_file(key), timings)


def read_timings(key: str) -> Any:
    """Return the stored timings, or None."""
    return _read(_timings_file(key))


def record_forecast_ratio(
    machine: MachineFingerprint, family: str, *, longer: float | None, fuller: float | None
) -> None:
    """Record the ratios of a run's step time and memory to their forecasts. A ratio that is not known is None."""
    file = _ratios_file(machine)
    ratios = _valid_ratios(_read(file))
    for kind, ratio in (("longer", longer), ("fuller", fuller)):
        if ratio is not None:
            runs = ratios.setdefault(kind, {}).setdefault(family, [])
            ratios[kind][family] = [*runs, ratio][-_MAX_RUNS:]
    if ratios:
        _write(file, ratios)


def median_forecast_ratios(machine: MachineFingerprint) -> tuple[dict[str, float], dict[str, float]]:
    """Return the `longer` and the `fuller` ratio of each family: the median of its last runs.

    The key "" has the median over these families. It is for families without runs, because most of the forecast error
    is in the model's costs, which all families share.
    """
    ratios = _valid_ratios(_read(_ratios_file(machine)))
    return _medians(ratios.get("longer", {})), _medians(ratios.get("fuller", {}))


def _plan_file(key: str) -> Path:
    return cache_folder() / f"plan-{key}.json"


def _timings_file(key: str) -> Path:
    return cache_folder() / f"timed-{key}.json"


def _ratios_file(machine: MachineFingerprint) -> Path:
    file = cache_file(machine)
    return file.with_name(file.name.replace("probe-", "ratios-", 1))


def _medians(ratios_by_family: Mapping[str, list[float]]) -> dict[str, float]:
    medians = {family: median(runs) for family, runs in ratios_by_family.items() if runs}
    return {**medians, _OTHER_FAMILIES: median(medians.values())} if medians else {}


def _valid_ratios(stored: Any) -> dict[str, dict[str, list[float]]]:
    """Return the valid part of the stored ratios: for each kind, the ratios of each family's runs."""
    if not isinstance(stored, dict):
        return {}
    kinds = {kind: stored[kind] for kind in ("longer", "fuller") if isinstance(stored.get(kind), dict)}
    return {
        kind: {family: [float(ratio) for ratio in runs if isinstance(ratio, int | float) and ratio > 0]
               for family, runs in runs_by_family.items() if isinstance(runs, list)}
        for kind, runs_by_family in kinds.items()
    }  # fmt: skip


def _read(file: Path) -> Any:
    try:
        return read_json(file)
    except (OSError, RuntimeError, ValueError):
        return None


def _write(file: Path, value: Mapping[str, Any]) -> None:
    with suppress(OSError, RuntimeError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, value)
