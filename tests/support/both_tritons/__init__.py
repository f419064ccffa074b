"""The same calls to our server and to the real Triton with our exported models: what they answer.

`servers.py` starts both over one repository, `calls_*.py` have the calls, `compared.py` holds the
two answers against each other and against the list of intended differences.
"""
