"""The residual stream: what is written to it, what is read from it, and what that adds to a logit.

Start at `residual.py` (writes) and `reads.py`.
"""
