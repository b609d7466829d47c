"""Moving one running request, with its KV cache, from one instance to another. Knows no gateway and no engine."""
