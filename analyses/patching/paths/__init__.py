"""Path patching: what a sender does to the metric through one receiver alone."""
