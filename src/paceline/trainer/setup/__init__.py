"""A job made ready to train: settings, data, model, optimizers, step."""
