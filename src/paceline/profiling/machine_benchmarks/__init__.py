"""The machine benchmark (probe): rates of devices, links and disk, measured on all ranks at the same time.

Start with `machine_benchmark.py`.

- `benchmark_cache.py`: The cache of this machine's benchmarks, one for each fingerprint.
- `benchmark_worker.py`: The worker of a machine benchmark.
- `collective_benchmarks.py`: Time every collective in groups of several sizes, with all groups busy at the same time.
- `compute_benchmarks.py`: Time matmuls, attention, memory streams, optimizers and the overhead of calls on each rank's
  device.
- `disk_benchmark.py`: Measure the write and read rates of a folder's disk, on all ranks at the same time.
- `interleaved_timer.py`: Time many calls in turn, on all ranks at the same time, within a time limit.
- `machine_benchmark.py`: Get the benchmark (probe) of this machine for a number of ranks: the cached one, or a new one.
- `this_machine.py`: Describe this process's machine as a cluster to plan for, from the cached benchmark or a new one.
"""
