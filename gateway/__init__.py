"""The stateless HTTP front."""
