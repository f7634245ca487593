"""Checkpoints in memory: what a restart after a fault continues from.

Start with `memory_tier.py`.

- `memory_folder.py`: The folder of a command's checkpoints in memory, which the memory tier and saves in the background
  share.
- `memory_tier.py`: Checkpoints in memory: newer than those on disk, and cheap, for a restart on the same machine.
- `open_memory.py`: The checkpoints in memory of a run: on one machine, on several nodes, or none.
- `peer_memory.py`: Checkpoints in memory of a run on several nodes: each rank sends copies of its files to the nodes
  after its own.
- `rank_memory.py`: A rank's part of the checkpoints in memory: the training waits for a copy, and a thread does the
  rest.
"""
