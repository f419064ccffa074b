"""Random grammars whose outputs have a bounded length, for tests of structured output.

Schemas are of this subset: objects (required and optional properties, no others), arrays (bounds,
items), enum, const, strings (a pattern, or lengths, or a format), integers and numbers with bounds,
booleans, null, anyOf, allOf of bounds, and references to $defs.
"""

import random
import string
from typing import Any, Final

Schema = dict[str, Any]

_MAX_DEPTH: Final = 3
_PATTERNS: Final = (
    "^[a-z]{1,8}$",
    "^[A-Z][a-z]{0,6}$",
    r"^\d{3}-\d{4}$",
    "^(red|green|blue)$",
    r"^[0-9a-f]{2}(:[0-9a-f]{2}){1,3}$",
    "^é{1,3}x?$",
)
_FORMATS: Final = ("date", "time", "uuid", "ipv4")


class RandomSchemas:
    """The same seed gives the same schemas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> Schema:
        """An object, the most common schema; sometimes with definitions that it refers to."""
        if self._random.random() < 0.2:
            part = {"$ref": "#/$defs/part"}
            schema = self._object(1, extra=part)
            return {**schema, "$defs": {"part": self._any(2)}}
        return self._object(1)

    def _any(self, depth: int) -> Schema:
        leaves = (self._enum, self._const, self._string, self._integer, self._number, self._simple)
        if depth < _MAX_DEPTH and self._random.random() < 0.5:
            return self._random.choice((self._object, self._array, self._any_of))(depth + 1)
        return self._random.choice(leaves)()

    def _object(self, depth: int, extra: Schema | None = None) -> Schema:
        names = self._random.sample(("id", "name", "tags", "a b", 'q"uote', "größe", "x"), 3)
        properties = {name: self._any(depth) for name in names[: self._random.randint(0, 3)]}
        if extra is not None:
            properties["part"] = extra
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if self._random.random() < 0.6],
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> Schema:
        low = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._any(depth),
            "minItems": low,
            "maxItems": low + self._random.randint(0, 2),
        }

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(2, 3))]}

    def _enum(self) -> Schema:
        values: list[Any] = ["red", "green", 'with "quotes"', "日本", 1, -2.5, None, True, ["x", 1]]
        return {"enum": self._random.sample(values, self._random.randint(1, 4))}

    def _const(self) -> Schema:
        return {"const": self._random.choice(("fixed", 42, None, False, {"k": [1, "v"]}))}

    def _string(self) -> Schema:
        match self._random.randrange(3):
            case 0:
                return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
            case 1:
                return {"type": "string", "format": self._random.choice(_FORMATS)}
            case _:
                low = self._random.randint(0, 4)
                return {
                    "type": "string",
                    "minLength": low,
                    "maxLength": low + self._random.randint(0, 8),
                }

    def _integer(self) -> Schema:
        low = self._random.randint(-1000, 1000)
        bounds = {"minimum": low, "maximum": low + self._random.randint(0, 500)}
        if self._random.random() < 0.2:
            return {"allOf": [{"type": "integer"}, bounds]}
        return {"type": "integer", **bounds}

    def _number(self) -> Schema:
        low = self._random.randint(-40, 40) / 4
        high = low + self._random.randint(1, 40) / 4
        # llguidance 1.5.0 allows an excluded integer if no other is in the range (docs/options.md).
        is_excluded = not (high.is_integer() and high - low < 1)
        return {
            "type": "number",
            "minimum": low,
            "exclusiveMaximum" if is_excluded else "maximum": high,
        }

    def _simple(self) -> Schema:
        return {"type": self._random.choice(("boolean", "null", ["boolean", "null"]))}


class RandomRegexes:
    """Regular expressions that Python and Rust read alike: literals, classes, groups, counts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def regex(self) -> str:
        return self._alternatives(0)

    def choices(self) -> list[str]:
        """Texts with every kind of character, some of them beginnings of others."""
        alphabet = string.ascii_letters + string.punctuation + ' \n\t\\"é日😀\x7f\x01'
        texts = [
            "".join(self._random.choices(alphabet, k=self._random.randint(0, 12)))
            for _ in range(self._random.randint(1, 6))
        ]
        return [*texts, texts[0] + "more"]

    def _alternatives(self, depth: int) -> str:
        count = self._random.choice((1, 1, 2, 3))
        return "|".join(self._sequence(depth) for _ in range(count))

    def _sequence(self, depth: int) -> str:
        return "".join(self._item(depth) for _ in range(self._random.randint(1, 3)))

    def _item(self, depth: int) -> str:
        atoms = [
            "[a-z]",
            "[^a-z\n]",
            "[0-9]",
            "a",
            "ab",
            "é",
            r"\.",
            "[0-9A-F]",
            '"',
            " ",
            "日",
            "/",
        ]
        atom = self._random.choice(atoms)
        if depth < 2 and self._random.random() < 0.4:
            atom = f"(?:{self._alternatives(depth + 1)})"
        low = self._random.randint(0, 3)
        high = low + self._random.randint(0, 3)
        count = self._random.choice(("", "", "?", f"{{{low},{high}}}"))
        return f"(?:{atom}){count}" if count else atom
