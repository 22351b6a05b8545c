"""A head as its two circuits: QK, OV, what they leave out, what a score is made of, copying.

Start at `weights.py`.
"""
