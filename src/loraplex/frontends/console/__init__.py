"""The console: one page in a browser, a client of the public API without routes of its own."""
