"""What is told of requests on every wire: their ids, the access log, traces, counts."""
