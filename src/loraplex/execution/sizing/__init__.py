"""How much memory weights, KV cache, adapters and a step take, and what fits."""
