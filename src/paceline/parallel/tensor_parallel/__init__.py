"""Tensor parallelism of any model: parameters are cut, activations know how they are cut, collectives follow.

Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation", 2022.
"""
