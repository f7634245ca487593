"""The comparison of two recorded scripts: the same training, a different one and why, or no answer and why.

Start with `script_comparison.py`.
"""
