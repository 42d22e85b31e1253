"""Offline calibration of the confidence head. Nothing here yet: the server verifies full blocks until it exists."""
