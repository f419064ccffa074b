"""The model of EchoBackend: its card and its chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.core.errors import InvalidRequestError
from loraplex.serving.backend import ModelCard
from loraplex.serving.text.chat_format import UNKNOWN_FORMAT, ChatFormat
from loraplex.testing import echo_tokenizer
from loraplex.testing.echo_adapters import CREATED

ROLES = ("system", "developer", "user", "assistant", "tool")


def echo_chat_prompt(
    messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> str:
    """The chat template: `<s>` and one `role: content` line per message, then `assistant: `."""
    lines = []
    for message in messages:
        if message.get("role") not in ROLES:
            raise InvalidRequestError(
                f"the chat template knows the roles {', '.join(ROLES)}; got {message.get('role')!r}"
            )
        lines.append(f"{message['role']}: {_text(message.get('content'))}\n")
    return "<s>" + "".join(lines) + ("assistant: " if add_generation_prompt else "")


def _text(content: str | Sequence[Mapping[str, str]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def echo_model(
    name: str, *, max_model_len: int = 4096, chat: ChatFormat = UNKNOWN_FORMAT
) -> ModelCard:
    """The card of a model that EchoBackend serves."""
    return ModelCard(
        name=name,
        path=f"/models/{name}",
        created=CREATED,
        max_model_len=max_model_len,
        vocab_size=echo_tokenizer.VOCAB_SIZE,
        eos_token_id=echo_tokenizer.EOS_TOKEN_ID,
        pad_token_id=echo_tokenizer.PAD_TOKEN_ID,
        dtype="float32",
        kv_dtype="float32",
        chat=chat,
    )
