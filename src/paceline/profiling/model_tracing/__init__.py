"""Trace a step of training: its FLOPs, activations, memory over time, and communication."""
