"""What is decided: layouts, memory, time, search and advice, without a device. Called, it is `pl.plan`."""

from paceline.plugins import call_package

call_package(__name__, as_if="paceline.verbs.functions:plan")
