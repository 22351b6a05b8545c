"""`python -m headstream` is the command line."""

from headstream.cli import main

main()
