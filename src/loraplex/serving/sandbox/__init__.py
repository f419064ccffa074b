"""Processes that may be killed, for work whose cost a client or a model folder decides."""
