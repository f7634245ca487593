"""The training step: forward, backward, reduction, optimizer update."""
