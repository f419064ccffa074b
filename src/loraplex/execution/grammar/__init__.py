"""Which tokens a grammar allows next."""
