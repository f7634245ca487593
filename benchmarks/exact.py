"""What exact mode costs: its step time against the default mode, interleaved in one run.

python benchmarks/exact.py [--rounds 60] [--ranks 2]
"""

import argparse
import statistics

import torch
from overhead import STEPS_A_ROUND, bootstrap, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    times = measure(rounds=options.rounds, ranks=options.ranks, checks=False, exact=True)["times"]
    ratios = [a / b for a, b in zip(times["exact"], times["paceline"], strict=True)]
    low, high = bootstrap(ratios)
    print(f"{options.ranks} ranks, {options.rounds} rounds of {STEPS_A_ROUND} steps, torch {torch.__version__}")
    print(f"exact / default: {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
