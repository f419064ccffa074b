"""Adapters by name: loading, changing, following folders, keeping."""
