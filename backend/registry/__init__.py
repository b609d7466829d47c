"""How an instance is known to the world."""
