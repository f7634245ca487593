"""BatchNorm over several microbatches and ranks, with the running statistics of one process.

Start with `running_statistics.py`.

- `norm_kernel_calls.py`: Record the kernel calls that update a norm's running statistics, also for norms with a custom
  forward.
- `norm_tape.py`: Record one norm's running statistics in a step on a tape, and replay the tape in the order of
  microbatches.
- `order_dependence.py`: Refuse norms whose result depends on the order of microbatches, if ranks can't run them in that
  order.
- `running_statistics.py`: Keep BatchNorm's running statistics equal to those of one process, which updates them
  microbatch by microbatch.
- `sequential_forwards.py`: Sequential forwards: after its microbatch, a rank sends the norm statistics to the rank of
  the next microbatch.
- `statistics_reads.py`: Detect user code that reads a norm's statistics during a step, such as `h +
  self.norm.running_mean`.
- `sync_batchnorm.py`: Synchronize BatchNorm over one microbatch of every replica, on any device.
"""
