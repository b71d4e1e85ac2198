"""Judging: statistics, figures and tables, drawn from records alone."""
