"""Order of the heads in fused projections of q, k and v: values of AttentionSpec.head_order."""


def heads_in_groups(num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return the order for rows that have, for each key head, its queries, itself, its value."""
    if num_kv_heads == 1 or num_heads % num_kv_heads:
        return ()  # in order; and what cannot be grouped is refused where the heads are read
    num_queries = num_heads // num_kv_heads
    size = num_queries + 2
    starts = range(0, num_kv_heads * size, size)
    queries = (start + query for start in starts for query in range(num_queries))
    keys = (start + num_queries for start in starts)
    values = (start + num_queries + 1 for start in starts)
    return (*queries, *keys, *values)
