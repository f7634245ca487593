"""Local SGD and DiLoCo: sites that train independently and synchronise every few steps.

Start with `local_sgd_step.py`.

- `local_sgd_rule.py`: The rules of local SGD and DiLoCo: sites train on their own and synchronise every few steps.
- `local_sgd_step.py`: The step of local SGD and DiLoCo: a site trains on its own and synchronises with the others
  periodically.
- `message_batching.py`: Batching of small vectors of several steps into one message, since each message has a fixed
  cost on a slow link.
- `outer_step.py`: A fragment: a set of parameters that sites synchronise together, by one step of the outer optimizer.
- `site_synchronizer.py`: The synchronisation of the sites of local SGD and DiLoCo: when they synchronise, and the
  synchronised weights.
"""
