"""Process groups: the world of ranks, the groups of a mesh, ranks simulated by threads, errors raised on all ranks.

Start with `process_group.py`.

- `collective_errors.py`: Errors that are raised on every rank if they occur on one rank, so that no rank waits for a
  failed rank.
- `exchange.py`: Exchanges: computations that send values between ranks, written so that several of them share one
  collective.
- `mesh_groups.py`: The process groups of a mesh, one world per axis: gradient reduction, tensor parallelism, pipeline,
  and so on.
- `process_group.py`: The world: this process's rank and the collectives over all ranks.
- `rank_threads.py`: Ranks as threads of one process: replicas of the `threads` layout, and ranks that are simulated to
  check a layout.
- `timed_barrier.py`: A barrier with a time limit, which does not hang if a rank never arrives.
"""
