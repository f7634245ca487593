"""Trace a step: its FLOPs, activations, memory over time, and communication."""
