"""Measuring what happens inside a network while it trains."""
