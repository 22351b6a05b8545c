"""One question a file, each answered by one result."""
