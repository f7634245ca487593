"""Logical shards: the fixed split of weights with which exact mode gives the same bits for any tp."""
