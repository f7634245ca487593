"""Measure machines, and trace what a model computes, stores and communicates.

Start with `environment.py`.

- `backends.py`: The `torch.distributed` backends that this build of torch has.
- `calibration_store.py`: The calibration store of a machine: stored plans, timed steps, and the ratios of measured runs
  to their forecasts.
- `cpu_contention.py`: Detect CPU contention: whether other programs used the cores while this run's ranks measured
  something.
- `environment.py`: Record the environment of a run: the facts that may explain a difference between two runs.
- `cpu_workspace/`: Forecast the workspace of CPU operators: the memory that their kernels allocate internally.
- `machine_benchmarks/`: The machine benchmark (probe): rates of devices, links and disk, measured on all ranks at the
  same time.
- `model_tracing/`: Trace a step of training: its FLOPs, activations, memory over time, and communication.
"""
