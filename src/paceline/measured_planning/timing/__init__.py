"""Time layouts and schedules on this machine, and cache the results.

Start with `layout_timing.py`.

- `compare_layouts_worker.py`: One rank of `compare JOB --layouts`: time a few steps, then measure schedule, memory and
  communication in others.
- `layout_timing.py`: Time layouts on the ranks of the run.
- `schedule_benchmark.py`: Measure the schedule of a pipeline, and simulate the same schedule with the measured compute
  times.
- `timing_cache.py`: A cache of step times that plans have measured.
- `timing_summary.py`: Summarize timed steps: their median, or an extrapolation from two truncated models.
"""
