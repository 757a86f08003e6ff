"""Tests of the package; one theme a file, many-rank tests through `tests.ranks`."""
