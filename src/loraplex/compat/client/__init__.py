"""The client programs of the original systems, under their own flags and with their printed lines.

Each program is two files: `X_options.py` holds its flags as a dataclass and is free of heavy
imports, `X.py` has `run(options, say)`, which gives the exit code. They speak the wire only.
"""
