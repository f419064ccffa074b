"""Chat templates and the text of completions; tokenizers are in `loraplex.text`."""
