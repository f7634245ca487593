"""What a run really holds in memory, on every rank: the measured side that a forecast is held against.

    python -m benchmarks.memory --out measured.jsonl                      # the whole list
    python -m benchmarks.memory --only 'llama fsdp*' --out some.jsonl     # a part of it
    python -m benchmarks.memory llama fsdp --ranks 2 --batch 8 --job.depth=6   # one setting

One line of JSON for each rank: see `measured.py`. What is counted and what is not: see `allocator.py`.
"""
