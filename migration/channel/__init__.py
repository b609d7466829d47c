"""Carrying KV blocks between the workers of two engines, pair by pair."""
