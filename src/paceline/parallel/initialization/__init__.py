"""Initialization: values from one plain build of the model, or from one random stream per tensor name.

Each rank gets only its shards.
"""
