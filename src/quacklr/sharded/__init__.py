"""Sharded and replicated models: norms of sharded weights, and the collectives that combine results over processes."""
