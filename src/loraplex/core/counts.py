"""Numbers of things as people write them."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 adapter`, `2 adapters`.

    plural: of a noun, or of a phrase, that does not end with an s then.
    """
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
