"""Side-by-side measurements, each a command that anyone can run."""
