"""The commands, one a file; `cli.run` imports them, which registers them."""
