"""The pages of docs/ that are written by the program: what it does with everything that clients of
replaced systems may send, set or read, from the tables that act.
"""
