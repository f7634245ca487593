"""State, loop, evaluation, saving: one rank's run. Called, it is `pl.train`."""

from paceline.plugins import call_package

call_package(__name__, as_if="paceline.verbs.functions:train")
