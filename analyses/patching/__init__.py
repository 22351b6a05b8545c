"""Causal patching: tasks, sites, engines, inference."""
