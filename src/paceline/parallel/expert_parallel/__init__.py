"""Expert parallelism: the experts of a mixture-of-experts block sharded over the ranks of an `ep` axis."""
