"""Bits per byte of a byte-trigram model on the held-out files of the text example.

    python benchmarks/trigram.py

Counts from the training files, smoothed towards the bigram and that towards the unigram; the two strengths are
chosen on the last tenth of the training files, not on the held-out ones.
"""

import numpy as np

from paceline.examples.text import Windows, read_text

CONTEXT, MOST = 64, 1024


def counts(text: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unigram, bigram and trigram counts."""
    unigram = np.bincount(text, minlength=256) + 1.0
    bigram = np.zeros((256, 256))
    np.add.at(bigram, (text[:-1], text[1:]), 1)
    trigram = np.zeros((65536, 256), dtype=np.float32)
    np.add.at(trigram, (text[:-2] * 256 + text[1:-1], text[2:]), 1)
    return unigram / unigram.sum(), bigram, trigram


def bits(text: np.ndarray, model: tuple[np.ndarray, np.ndarray, np.ndarray], k1: float, k2: float) -> float:
    """Mean bits per byte from the third byte on."""
    unigram, bigram, trigram = model
    smoothed = (bigram + k1 * unigram) / (bigram.sum(1, keepdims=True) + k1)
    before = text[:-2] * 256 + text[1:-1]
    lower = smoothed[text[1:-1], text[2:]]
    return float(-np.log2((trigram[before, text[2:]] + k2 * lower) / (trigram[before].sum(1) + k2)).mean())


def main() -> None:
    """Print the figure."""
    training = read_text(held_out=False).numpy().astype(np.int64)
    held_out = read_text(held_out=True).numpy().astype(np.int64)
    held_out = held_out[: Windows(read_text(held_out=True), CONTEXT, max_windows=MOST).count * CONTEXT + 1]
    cut = len(training) * 9 // 10
    part = counts(training[:cut])
    choices = [(k1, k2) for k1 in (1.0, 3.0, 10.0, 30.0) for k2 in (0.5, 1.0, 3.0, 10.0)]
    k1, k2 = min(choices, key=lambda pair: bits(training[cut:], part, *pair))
    print(f"trigram bits_per_byte {bits(held_out, counts(training), k1, k2):.4f} (strengths {k1}, {k2})")


if __name__ == "__main__":
    main()
