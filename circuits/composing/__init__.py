"""How heads compose: scores, subspaces, virtual heads, and the paths of attention-only models.

Start at `composition.py`.
"""
