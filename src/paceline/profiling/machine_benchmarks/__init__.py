"""A probe of *here*: how quick this machine's devices, links and disk are while all ranks are busy at the same time."""
