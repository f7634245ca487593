#!/bin/sh
# Make report.png and compare.png: a digits run that loses a rank and goes on with twice as many; needs chromium.
#   sh docs/pictures/report.sh docs/pictures
set -eu
to=$(cd "$1" && pwd)
work=$(mktemp -d)
cd "$work"
paceline new digits >/dev/null
settings="--train.epochs 20 --log.every 2 --eval.every 23 --train.micro_batch_size 16"
# shellcheck disable=SC2086
{
  paceline train digits_cnn.py --run-dir runs/digits --ranks 2 $settings --survive.restarts 0 --faults "kill rank=1 step=150" || true
  paceline train digits_cnn.py --run-dir runs/digits --ranks 4 $settings
  paceline train digits_cnn.py --run-dir runs/slower --ranks 2 $settings --job.lr 1e-3
  paceline verify digits_cnn.py --run-dir runs/checked --ranks 4 --train.micro_batch_size 16
} >log.txt 2>&1
paceline report runs/digits
paceline compare runs/digits runs/slower
shoot() {
  chromium --headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars \
    --user-data-dir="$work/browser" --screenshot="$to/$2" --window-size="1080,$3" "file://$work/$1" >/dev/null 2>&1
}
shoot runs/digits/report.html report.png 1240
shoot compare.html compare.png 900
rm -rf "$work/browser"
echo "$work"
