#!/bin/sh
# Train the text example on two processes, check that this is the same training as in one process, and write the report.
set -eu
paceline new text >/dev/null
paceline train text.py --ranks 2 --run-dir runs/demo --evaluate-first --job.steps "${STEPS:-500}"
echo
echo "Is that the same training as one process?"
paceline verify text.py --layout ddp --ranks 2 --run-dir runs/demo-verify --job.steps "${STEPS:-500}"
cp runs/demo-verify/answer-verify.json runs/demo/
echo
echo "The page: $(pwd)/$(paceline report runs/demo)"
