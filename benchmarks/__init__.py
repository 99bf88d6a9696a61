"""One command a claim: ``python -m benchmarks.NAME [--quick]`` prints a table and, last, one line of JSON."""
