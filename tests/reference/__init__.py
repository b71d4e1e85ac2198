"""Slow twins of fast paths, in float64: one file a measure."""
