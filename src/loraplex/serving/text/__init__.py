"""Chat templates, words as tokens, what of an answer is shown; tokenizers are `loraplex.text`."""
