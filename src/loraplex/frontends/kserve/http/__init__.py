"""The HTTP side: plain Starlette routes under /v2."""
