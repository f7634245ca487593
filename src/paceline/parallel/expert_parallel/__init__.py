"""The experts of a mixture-of-experts block over the ranks of an `ep` axis."""
