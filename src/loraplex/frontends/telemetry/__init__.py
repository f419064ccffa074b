"""Observation of requests on every wire: ids, the access log, traces, and counts."""
