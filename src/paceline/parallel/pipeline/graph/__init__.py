"""Pipeline stages of any model, which is split along the graph that `torch.export` returns."""
