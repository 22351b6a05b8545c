"""An MLP as a key-value memory: its keys, its values, what fires them and what they raise.

Start at `keys_values.py`.
"""
