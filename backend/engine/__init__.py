"""Engines: vLLM, and a modelled one that speaks the same HTTP."""
