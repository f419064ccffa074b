"""Templates with the constructs of each model family, rendered by us and by transformers.

The files in chat_templates/ are our own; they have the families' markers and their ways of writing
Jinja. Whatever transformers does with a conversation, we do: the same text, or a refusal.
"""

import copy
import json
from pathlib import Path

import pytest

from loraplex.core.errors import InvalidRequestError
from loraplex.serving.text.chat_template import ChatTemplate
from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers
from support.naming import refused

FILES = Path(__file__).parent / "chat_templates"
FAMILIES = sorted(path.stem for path in FILES.glob("*.jinja"))
TAKES_PARTS = {
    "gemma-3",
    "glm-4",
    "granite-4",
    "lfm2.5",
    "llama-3.2-vision",
    "mistral-tekken",
    "qwen-3.5",
    "smol-vision",
}
KNOWS_DEVELOPER = {"gpt-oss"}

SYSTEM = {"role": "system", "content": "Be brief. "}
USER = {"role": "user", "content": " Hi <there> 世界 {{ 1 + 1 }} {% raise %} "}
REPLY = {"role": "assistant", "content": "Hello!\n"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <now>.",  # language: quoted
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Köln", "東京"]},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "description": "Now.", "parameters": {}}},
]
CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}},
}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "weather", "content": "23 °C"}
CALLS = [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT]
TWO_CALLS = [
    USER,
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
    RESULT,
    RESULT,
]

CASES = {
    "user": ([USER], {}),
    "turns": ([USER, REPLY, USER], {}),
    "system": ([SYSTEM, USER, REPLY, USER], {}),
    "ends with an answer": ([USER, REPLY], {}),  # language: quoted
    "two users": ([USER, USER], {}),
    "late system": ([USER, REPLY, SYSTEM, USER], {}),
    "tools": ([USER], {"tools": TOOLS}),
    "tools and system": ([SYSTEM, USER], {"tools": TOOLS}),
    "call": (CALLS, {"tools": TOOLS}),
    "answered call": ([*CALLS, REPLY, USER], {"tools": TOOLS}),
    "two calls": (TWO_CALLS, {"tools": TOOLS}),
    "reasoning": ([USER, {**REPLY, "reasoning_content": "hm"}, USER], {}),
    "reasoning by another name": ([USER, {**REPLY, "reasoning": "hm"}, USER], {}),
    "thoughts in the text": ([USER, {**REPLY, "content": "<think>\nhm\n</think>\n\nYes"}], {}),
    "documents": (
        [USER],
        {"documents": [{"title": "T", "text": "x"}, {"title": "U", "text": "y"}]},
    ),
    "no thinking": ([USER], {"enable_thinking": False, "thinking": False}),
    "thinking": ([USER], {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
    "date": ([USER], {"date_string": "3 Mar 2025", "tools_in_user_message": False, "tools": TOOLS}),
    "own tools": (CALLS, {"builtin_tools": ["weather", "code_interpreter"]}),
    "kwargs": ([USER], {"controls": {"length": "short"}, "bos_token": "<other>"}),
    "nulls": ([{**USER, "name": None}, {**REPLY, "tool_calls": None, "refusal": None}], {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model folder for each family, with its template in chat_template.jinja."""
    made = {}
    for family in FAMILIES:
        folder = tiny_tokenizers.write_byte_level(tmp_path_factory.mktemp(family))
        (folder / "chat_template.jinja").write_text((FILES / f"{family}.jinja").read_text())
        made[family] = folder
    return made


@pytest.fixture(scope="module")
def both(folders):
    """Name to (ours, transformers') of each family."""
    from transformers import AutoTokenizer

    return {
        family: (
            ChatTemplate.load(folder, load_tokenizer(folder).special_tokens),
            AutoTokenizer.from_pretrained(folder),
        )
        for family, folder in folders.items()
    }


def render(ours, messages, options, **more) -> str:
    known = {key: options[key] for key in ("tools", "documents") if key in options}
    others = {key: value for key, value in options.items() if key not in known}
    return ours.render(messages, template_kwargs=others, **known, **more)


def expected(theirs, messages, options, **more) -> str | None:
    """None: the template refuses or fails."""
    try:
        return theirs.apply_chat_template(messages, tokenize=False, **options, **more)
    except Exception:
        return None


def check(ours, theirs, given, same_for_theirs, options, **more) -> bool:
    """Whether there is a text."""
    more = {"add_generation_prompt": True, **more}
    text = expected(theirs, same_for_theirs, options, **more)
    before = copy.deepcopy(given)
    if text is None:
        with pytest.raises(InvalidRequestError, match=r"chat template|continue_final_message"):
            render(ours, given, options, **more)
    else:
        assert render(ours, given, options, **more) == text
    assert given == before
    return text is not None


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family, add_generation_prompt, both):
    ours, theirs = both[family]
    num_texts = 0
    for messages, options in CASES.values():
        same = messages
        if family == "smol-vision":
            same = [as_parts(message) for message in messages]
        num_texts += check(
            ours, theirs, messages, same, options, add_generation_prompt=add_generation_prompt
        )
    assert num_texts >= 5


def as_parts(message):
    """What a template gets that cannot take a text."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_as_the_wire_has_them(family, both):
    """JSON text there; an object for the template."""
    ours, _ = both[family]
    wire = copy.deepcopy(CALLS)
    function = wire[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    outcomes = []
    for messages in (CALLS, wire):
        try:
            outcomes.append(ours.render(messages, tools=TOOLS))
        except InvalidRequestError as error:
            outcomes.append(error.message)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_text(family, both):
    ours, theirs = both[family]
    joined = {**PARTS, "content": "one \ntwo"}
    for before in ([], [USER, REPLY]):
        given = [*before, PARTS]
        same = given if family in TAKES_PARTS else [*before, joined]
        if family == "smol-vision":
            same = [as_parts(message) for message in same]
        assert check(ours, theirs, given, same, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_developer_is_system_if_the_template_does_not_know_the_role(family, both):
    ours, theirs = both[family]
    given = [{**SYSTEM, "role": "developer"}, USER]
    same = given if family in KNOWS_DEVELOPER else [SYSTEM, USER]
    if family == "smol-vision":
        same = [as_parts(message) for message in same]
    check(ours, theirs, given, same, {})


@pytest.mark.parametrize("content", ["I am", "I am  ", "a<|im_end|>b"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "loops"])
def test_a_message_to_go_on_with(family, content, both):
    ours, theirs = both[family]
    given = [USER, {"role": "assistant", "content": content}]
    same = [as_parts(message) for message in given] if family == "smol-vision" else given
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert check(ours, theirs, given, same, {}, **options)


def test_a_part_to_go_on_with(both):
    ours, theirs = both["gemma-3"]
    given = [USER, {**PARTS, "role": "assistant"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert check(ours, theirs, given, given, {}, **options)


COMMAND_R = [
    {
        "name": "default",
        "template": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{% set turns = messages[1:] %}{% set preamble = messages[0]['content'] %}"
        "{% elif false == true %}{% set turns = messages %}"
        "{% set preamble = 'You are Command.' %}{% else %}{% set turns = messages %}"
        "{% set preamble = false %}{% endif %}{% if preamble != false %}"
        "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + preamble + '<|END_OF_TURN_TOKEN|>' }}"
        "{% endif %}{% for turn in turns %}{% set content = turn['content'] %}"
        "{% if turn['role'] == 'user' %}"
        "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
        "{% elif turn['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' "
        "+ content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
    },
    {
        "name": "tool_use",
        "template": "{%- macro type_name(name, spec, optional) %}"
        "{%- set types = {'string': 'str', 'number': 'float'} %}"
        "{%- if spec == 'array' %}List{%- else %}{{- types.get(spec, 'Any') }}{%- endif %}"
        "{%- endmacro -%}{{ bos_token }}{% for tool in tools %}"
        "{%- set tool = tool.function or tool %}def {{ tool.name }}("
        "{%- for name, field in (tool.parameters.properties or {}) | items %}"
        "{{- ', ' if not loop.first }}{{ name }}: {{ type_name(name, field.type, false) }}"
        "{%- endfor %}){{ '\\n' }}{% endfor %}{% for turn in messages %}"
        "{%- if turn.role | lower == 'user' %}<|USER_TOKEN|>{{ turn.content }}"
        "{%- elif turn.tool_calls %}Action: ```json\\n{{ turn.tool_calls"
        " | map(attribute='function') | list | tojson(indent=4) }}```"
        "{%- elif turn.role == 'tool' %}<results>{{ turn.content }}"
        "</results>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|CHATBOT_TOKEN|>{% endif %}",
    },
    {
        "name": "rag",
        "template": "{{ bos_token }}{% for document in documents %}{{ loop.index0 }}"
        "{% for key, value in document.items() %}{{ key }}: {{ value }}\n{% endfor %}{% endfor %}",
    },
]


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_command_r_has_templates_by_name(place, tmp_path):
    from transformers import AutoTokenizer

    folder = tiny_tokenizers.write_byte_level(tmp_path)
    if place == "tokenizer_config.json":
        config = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps({**config, "chat_template": COMMAND_R}))
    else:
        (folder / place).mkdir()
        (folder / "chat_template.jinja").write_text(COMMAND_R[0]["template"])
        for entry in COMMAND_R[1:]:
            (folder / place / f"{entry['name']}.jinja").write_text(entry["template"])
    ours = ChatTemplate.load(folder, load_tokenizer(folder).special_tokens)
    theirs = AutoTokenizer.from_pretrained(folder)
    num_texts = sum(check(ours, theirs, given, given, options) for given, options in CASES.values())
    assert num_texts >= 15
    assert "def weather(city: str, days: List)" in ours.render([USER], tools=TOOLS)


@pytest.mark.parametrize("name", ["chat_template.json", "tokenizer_config.json"])
def test_template_in_a_json_file(name, tmp_path, both):
    folder = tiny_tokenizers.write_byte_level(tmp_path)
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    source = (FILES / "qwen-3.jinja").read_text()
    path.write_text(json.dumps({**config, "chat_template": source}))
    ours = ChatTemplate.load(folder, load_tokenizer(folder).special_tokens)
    assert ours.render(CALLS, tools=TOOLS) == both["qwen-3"][0].render(CALLS, tools=TOOLS)


def test_a_folder_without_a_template(tmp_path):
    folder = tiny_tokenizers.write_byte_level(tmp_path)
    with refused(InvalidRequestError, "/v1/completions", "chat_template.jinja", param="messages"):
        ChatTemplate.load(folder).render([USER])


def test_messages_are_data_and_no_template(both):
    hostile = {"role": "user", "content": "{{ raise_exception('x') }}{% for i in range(9) %}"}
    for family, (ours, _) in both.items():
        if family != "loops":
            assert hostile["content"] in ours.render([hostile])


# ------------------------------------------------------------------ as llgtrt gives a template


LLGTRT = """\
{%- if json_schema is defined %}{{ json_schema | tojson }}{% endif %}
{%- if tools is defined %}{{ tools | length }} tools{% endif %}
{%- if documents is defined %}{{ documents | length }} documents{% endif %}
{%- if tools_in_user_message is defined %} in user message{% endif %}
{{ date_string }} {{ messages[0].content }} {{ unk_token is defined }}
{{- ' ' }}{{ 'name' in messages[0] }}"""


def test_what_is_absent_is_not_defined():
    template = ChatTemplate({"default": LLGTRT}, {"bos_token": "<s>"}, json_indent=4)
    kwargs = {"date_string": "1 May 2025", "tools_in_user_message": None, "json_schema": None}
    message = {"role": "user", "content": "Hi", "name": None}
    text = template.render([message], template_kwargs=kwargs, omits_absent=True)
    assert text == "1 May 2025 Hi False False"
    kwargs["json_schema"] = {"a": 1}
    text = template.render([message], template_kwargs=kwargs, tools=TOOLS, omits_absent=True)
    assert text == '{\n    "a": 1\n}2 tools1 May 2025 Hi False False'


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt"])
def test_what_the_request_says_is_no_variable(name):
    with refused(InvalidRequestError, f"chat_template_kwargs.{name}", param="chat_template_kwargs"):
        ChatTemplate({"default": "x"}).render([USER], template_kwargs={name: "y"})
