"""The streaming pass: statistics of every head's attention without the n x n matrix.

Start at `measure.py`; a statistic is a small class (`statistic.py`, examples in `masses.py`).
"""
