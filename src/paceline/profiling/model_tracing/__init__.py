"""A traced step: FLOPs, activations, memory over time, communication."""
