"""What runs beside each engine: its registry entry, its engine, its llumlet."""
