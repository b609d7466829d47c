"""Constant load for a long time: whether anything grows."""
