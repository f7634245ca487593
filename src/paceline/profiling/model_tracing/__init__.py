"""Tracing of a step: FLOPs, activations, memory over time, communication."""
