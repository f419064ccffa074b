"""Tokens to text and back: tokenizers, chat templates, what of an answer is shown."""
