"""Compares the responses of our server and of the real Triton to the same calls.

`servers.py` starts both with one repository of exported models, `calls_*.py` contain the calls, and
`compared.py` compares the two responses with each other and with the list of intended differences.
"""
