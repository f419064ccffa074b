"""The token ids of a prompt that is text."""

from loraplex.text.tokenizer import Tokenizer


def prompt_token_ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """With add_special_tokens, what the folder's tokenizer puts around a text, but never two BOS:
    a text that begins with it (a chat template wrote it, or the client) gets no other."""
    token_ids = tokenizer.encode(text, add_special_tokens)
    bos = tokenizer.bos_token_id
    has_two = add_special_tokens and bos is not None and token_ids[:2] == [bos, bos]
    return token_ids[1:] if has_two else token_ids
