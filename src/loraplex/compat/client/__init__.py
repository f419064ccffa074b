"""The client programs of the original systems, with their own flags and printed lines.

`programs.py` is the table of programs and flags. Each program's module has a function `run`, which
takes the options and a printer of lines, and returns the exit code. The programs use the wire
protocols only.
"""
