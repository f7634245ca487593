"""How each torch function propagates the sharding of its arguments."""
