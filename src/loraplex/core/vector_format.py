"""How a model makes vectors of texts, as its folder states: front ends and the library apply it."""

from collections.abc import Mapping, Sequence

import msgspec

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.task import Pool, PoolKind

PROMPTS_FILE = "config_sentence_transformers.json"
"""File of a folder's prompts, of a model or of an adapter."""
_MAX_SHOWN = 20
"""Names of prompts that an error lists."""


class TextPrompts(msgspec.Struct, frozen=True):
    """Texts that stand before a text, by name."""

    texts: Mapping[str, str] = {}
    default: str = ""
    """Name of the one that is used without a name; or none."""

    def text(self, name: str | None, roles: Sequence[str] = ()) -> str:
        """Return the text before texts. name: None is the first of the roles, else the default.

        Raises InvalidParameterError for a name that is none of these.
        """
        if name is None:
            known_roles = (role for role in roles if role in self.texts)
            return self.texts.get(next(known_roles, self.default), "")
        if name not in self.texts:
            known = ", ".join(list(self.texts)[:_MAX_SHOWN]) or "none"
            raise InvalidParameterError(
                f"prompt_name must be a prompt of the model or its adapter, got {name!r}; known: "
                f"{known}",
                param="prompt_name",
            )
        return self.texts[name]


class VectorFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Format of one model's vectors. The default is that of a decoder without such files."""

    kind: PoolKind = PoolKind.LAST
    normalizes: bool = True
    """Whether vectors are divided by their lengths."""
    prompts: TextPrompts = TextPrompts()
    """Prompts of the model, which those of an adapter's folder replace."""
    includes_prompts: bool = True
    """Whether means and CLS have the tokens of prompts, and of what the tokenizer puts before."""
    dimensions: tuple[int, ...] = ()
    """Lengths that vectors may be cut to; empty: any."""
    max_tokens: int | None = None
    """Maximum length of a text; None: the model's."""
    problem: str = ""
    """Why vectors of the model would not be what its folder states; empty: they are."""

    def pool(self, *, dimensions: int | None = None, normalize: bool | None = None) -> Pool:
        """Return the task of a vector.

        normalize: None is what the model does, but shorter vectors have the length 1, as OpenAI's.
        Raises UnsupportedFeatureError if the model's vectors are not served, and
        InvalidParameterError for dimensions that it was not trained for.
        """
        if self.problem:
            raise UnsupportedFeatureError(f"vectors of this model are not served: {self.problem}")
        if dimensions is not None and self.dimensions and dimensions not in self.dimensions:
            raise InvalidParameterError(
                f"dimensions must be one of {', '.join(map(str, self.dimensions))}, got "
                f"{dimensions}: the model has no others",
                param="dimensions",
            )
        if normalize is None:
            normalize = self.normalizes or dimensions is not None
        return Pool(self.kind, dimensions, normalize=normalize)

    def prompt(self, name: str | None) -> str:
        """Return the text before texts without an adapter; see TextPrompts.text."""
        return self.prompts.text(name)
