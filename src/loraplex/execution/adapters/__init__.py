"""Adapters on the device: the page pool, its tables, and the copies into it."""
