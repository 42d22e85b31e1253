"""Measurements; see docs/LOG.md for results with their conditions."""
