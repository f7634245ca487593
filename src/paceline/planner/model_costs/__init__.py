"""Describe the cost of a model's layers: profile, chain of layers, balance of stages, FLOPs.

Start with `model_profile.py`.

- `decoder_profile.py`: Build the profile of a decoder-only transformer from its sizes, for planning a model that does
  not exist yet.
- `layer_chain.py`: Represent a model as a chain of parts, in which equal parts are stored once, and cut the chain into
  stages.
- `model_profile.py`: Define the profile of a model: all that the planner needs to know.
- `stage_balance.py`: Divide a chain of blocks into stages with the smallest possible maximum time, by dynamic
  programming.
- `training_flops.py`: Count the training FLOPs of a model, from which its MFU is computed.
"""
