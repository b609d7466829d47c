"""The agent beside each engine: reports load, answers migration messages, drains."""
