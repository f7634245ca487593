"""Checkpoints in the memory of several nodes: each node holds the files of its own ranks, and copies of a neighbour's.

Start with `memory_server.py`.

- `memory_server.py`: The server with which the agent of a node gives other nodes access to the checkpoints in its
  memory, over HTTP.
- `peer_checkpoint.py`: A checkpoint in the memory of several nodes: which nodes hold its files, and the manifest, which
  comes last.
- `peer_files.py`: Files in the memory of other nodes: a rank writes copies of its own there, and reads those that its
  node lacks.
- `peer_folder.py`: The folder of a node's checkpoints in memory: which ranks' files are complete in it.
"""
