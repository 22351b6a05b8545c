"""Models whose circuits are known: generators, tasks, recipes, and the shipped checkpoints."""
