"""What a client wants the output to match: checked, and brought into one form."""
