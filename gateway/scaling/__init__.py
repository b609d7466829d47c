"""Instances that come and go: operations that start and stop them, the port to whatever runs them, and the auto-scaler."""
