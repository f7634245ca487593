"""Initialize a model: each rank gets only its shards.

The values come from one plain build of the model, or from one random stream per tensor name.
"""
