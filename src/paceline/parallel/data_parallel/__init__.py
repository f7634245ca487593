"""Data parallelism: bucketed gradient all-reduce, exact gradient sums, module buffers, and replicas in threads.

Start with `reducer.py`.

- `exact_reduction.py`: Exact gradient sums: gradients are added as integers, so the sum is bitwise equal for any order
  of addition.
- `fixed_point.py`: Fixed-point sums: floats rounded to multiples of 2^k and added as int64, by plain torch operations.
- `module_buffers.py`: Keep the buffers of modules equal on all replicas, by one of several policies, although forwards
  change them.
- `reducer.py`: Bucketed gradient all-reduce for data parallelism, overlapped with backward.
- `shared_memory_model.py`: A model in the shared memory of one machine, which several processes update without locks
  (Hogwild).
- `thread_replicas.py`: Thread replicas: several models in one process that share the weights of the first one.
"""
