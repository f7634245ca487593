"""Plan a training without a device: forecast memory and step time, search layouts and advise, from a model profile."""
