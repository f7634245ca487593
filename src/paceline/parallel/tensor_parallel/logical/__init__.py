"""Logical shards: the fixed split of weights with which exact mode gives the same bits for any tp.

Start with `logical_group.py`.

- `logical_group.py`: The tensor-parallel group of exact mode: logical ranks, of which each process computes several.
- `logical_shards.py`: A tensor subclass that consists of the logical shards which this rank holds of a sharded tensor.
"""
