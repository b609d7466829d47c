"""PURE. Where requests go, and when they move."""
