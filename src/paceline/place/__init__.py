"""Place a model: replicate, shard, tensor, stages, remat. As `pl.place(build, layout=...)`: see `train/placing.py`."""

from paceline.plugins import call_package

call_package(__name__, as_if="paceline.train.placing:place")
