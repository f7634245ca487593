"""Setup of a training run: settings, data, model, optimizers and step."""
