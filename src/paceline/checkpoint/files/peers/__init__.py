"""Checkpoints in the memory of several nodes: each node holds the files of its own ranks, and copies of a neighbour's.

Start with `memory_server.py`.
"""
