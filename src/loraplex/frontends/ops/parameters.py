"""Values of query parameters."""

from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.openapi.operation import Parameter


def number(text: str | None, parameter: Parameter) -> int | None:
    """Return the value of a parameter; None: it is absent."""
    if text is None:
        return None
    least, most = parameter.schema["minimum"], parameter.schema["maximum"]
    # isdecimal alone would take other scripts' digits, and any number of them.
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if not least <= value <= most:
        raise InvalidParameterError(
            f"{parameter.name} must be a whole number in [{least}, {most}], got {text!r}",
            param=parameter.name,
        )
    return value
