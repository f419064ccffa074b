import pytest

from loraplex.core.errors import InvalidRequestError
from loraplex.serving.text.chat_template import ChatTemplate
from support.naming import refused

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content | trim")
LEAVES_OUT = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
USER_MESSAGE = {"role": "user", "content": "Say yes"}


def continued(template: str, *messages: dict) -> str:
    return ChatTemplate({"default": template}).render(
        [USER_MESSAGE, *messages], add_generation_prompt=False, continue_final_message=True
    )


@pytest.mark.parametrize("content", ["Ye", "Ye ", "Ye\n"])
def test_the_text_ends_where_the_last_message_does(content):
    before = "<|user|>Say yes<|end|><|assistant|>"
    message = {"role": "assistant", "content": content}
    assert continued(CHATML, message) == before + content
    assert continued(TRIMS, message) == before + "Ye", "as a template strips it"


def test_parts():
    parts = [{"type": "text", "text": "Y"}, {"type": "text", "text": "e"}]
    assert continued(CHATML, {"role": "assistant", "content": parts}).endswith("<|assistant|>Y\ne")


def test_the_same_words_before_do_not_mislead():
    text = continued(CHATML, {"role": "assistant", "content": "Say yes"})
    assert text == "<|user|>Say yes<|end|><|assistant|>Say yes"


def test_a_template_that_leaves_it_out():
    with refused(InvalidRequestError, "continue_final_message", param="continue_final_message"):
        continued(LEAVES_OUT, {"role": "assistant", "content": "Ye"})


def test_a_message_without_text():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for fields in ({"content": ""}, {"tool_calls": [call]}):
        with refused(InvalidRequestError, "messages[1]", param="messages[1].content"):
            continued(CHATML, {"role": "assistant", **fields})


def test_a_message_that_holds_the_mark():
    message = {"role": "assistant", "content": "a\ue000continue\ue001b"}
    with refused(InvalidRequestError, repr("\ue000continue\ue001"), param="messages"):
        continued(CHATML, message)
