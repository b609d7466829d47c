"""vLLM, unmodified, as an engine that can give running requests away and take them in. The only importer of vllm."""
