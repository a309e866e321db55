"""Batch files: lines in, one answer a line out, in order."""
