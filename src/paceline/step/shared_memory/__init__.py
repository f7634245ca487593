"""Replicas as threads of one process, and Hogwild on shared weights."""
