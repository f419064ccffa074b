"""The engines as serving sees them: links, lives and deaths, requests across them."""
