"""Tenants: their keys, and how much of the server each may have."""
