"""The studies: one file a question."""
