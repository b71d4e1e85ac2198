"""Driving: configurations, networks, data, the training loop, studies and the command line."""
