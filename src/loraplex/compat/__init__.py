"""Entry points, file formats and tools of the systems that loraplex replaces."""
