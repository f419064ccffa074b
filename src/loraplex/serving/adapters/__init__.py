"""Workers of the catalog: load adapters, follow folders, repair files."""
