"""Why a gradient or an update differs: hypotheses that are tested against the numbers."""
