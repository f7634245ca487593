"""Replicas as threads of one process, and Hogwild on shared weights.

Start with `threads_step.py`.

- `hogwild.py`: The step of Hogwild: workers update the same weights without locks (Niu et al., "Hogwild!", NIPS 2011).
- `hogwild_rule.py`: The Hogwild rule: workers update the same weights without locks.
- `rng_turns.py`: Replicas in one process take turns to draw random numbers, because they share the host's random
  generators.
- `thread_pool.py`: The threads of replicas: the first replica runs in the calling thread, the others in a pool of
  threads.
- `threads_step.py`: The synchronous step with several replicas in one process: each runs its microbatches in its own
  thread.
"""
