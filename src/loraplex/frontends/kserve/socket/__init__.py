"""The request socket: inference requests from processes of this machine, over a unix socket."""
