"""An engine without a model: the modelled engine in real time, with real KV bytes, behind an OpenAI-compatible server."""
