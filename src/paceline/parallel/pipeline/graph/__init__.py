"""Pipeline stages of any model, split along the graph that `torch.export` returns."""
