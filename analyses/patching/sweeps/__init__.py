"""Sweeps run block by block: stored, resumed, handed to workers, priced beforehand."""
