"""Heads cut out: ablations, sets that stand in for one another, faithfulness of a circuit."""
