"""Faults at random moments, on real processes under load; each stream is compared with what it must be."""
