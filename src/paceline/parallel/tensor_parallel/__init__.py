"""Tensor parallelism of any model: parameters are sharded, activations carry their sharding, collectives follow.

Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation", 2022.
"""
