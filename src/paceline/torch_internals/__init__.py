"""Private torch APIs, and the dispatch modes and random streams that are built on them.

Code outside this package imports no private name of torch. It reads only a few private attributes, such as `torch._ops`
and the `_orig_mod` of a compiled module.
"""
