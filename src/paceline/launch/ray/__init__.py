"""Training under Ray Train: Ray places, resizes and restarts its workers, and each worker starts the agent of a node.

Start with `ray_run.py`.
"""
