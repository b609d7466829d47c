"""The operator's routes: what instances there are, what runs where, what happens, and orders."""
