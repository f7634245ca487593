"""Expert parallelism: the experts of a mixture-of-experts block sharded over the ranks of an `ep` axis.

Start with `expert_parallel.py`.

- `discovery.py`: Discovery of the modules of a model that hold experts, and assignment of experts to ranks.
- `expert_parallel.py`: Expert parallelism: experts sharded over the ranks of an `ep` axis.
- `expert_parallel_check.py`: A check, in one process and before the run starts, that a model gives the same results
  with sharded experts.
- `token_dispatch.py`: Dispatch of tokens to the ranks of their experts, and return of the results, by all-to-all with
  uneven counts.
"""
