"""Chat templates against transformers' apply_chat_template, and what is refused."""

import datetime
import json
import re

import pytest

from loraplex.core.errors import ConfigError, InvalidRequestError
from loraplex.serving.text.chat_template import ChatTemplate
from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers
from support.naming import naming, refused

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
Be helpful.<|im_end|>
    {% endif %}
<|im_start|>{{ message.role }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if custom_date is defined %}{%- set date = custom_date %}
{%- else %}{%- set date = '26 Jul 2024' %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start|>system<|end|>\\n\\nToday: ' + date + '\\n\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n' }}{%- endfor %}
{%- endif %}
{{- system + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>ipython<|end|>' + (message.content | tojson) + '<|eot|>' }}
    {%- elif message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{- '}<|eom|>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}
    {%- else %}
        {% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

CONTROLS = """\
{% macro show(text) %}[{{ text }}]{% endmacro %}
{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}
{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}
{{ show(messages | map(attribute='content') | join(', ')) }} {{ '<&>' }} {{ 'ab' * 3 }}
{{ 2 ** 10 }} {{ 'a' + 'b' }} {{ 3 * 4 + 1 }} {{ 'a' ~ 1 }} {{ [1] + [2] }} {{ 2 ** -1 }}
{{ {'k': 'é<', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }} {{ pad_token }}
{% set parts = messages[0].content.split(' ') %}{{ parts[-1] }}{{ flag | default('none') }}
{% for d in documents or [] %}{{ d.title }}{% endfor %}
{% if messages[-1].reasoning_content is defined %}{{ messages[-1].reasoning_content }}{% endif %}
"""

USER = {"role": "user", "content": "Hi <there> 世界 "}
TALK = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Hello!", "name": None},
    {"role": "user", "content": "And now?"},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"é": ["<b>"]}}}
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"a": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "23 °C"},
]


@pytest.fixture
def folder(tmp_path):
    return tiny_tokenizers.write_byte_level(tmp_path)


def set_config(folder, **values) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def both(folder):
    """(ours, transformers') for the folder."""
    from transformers import AutoTokenizer

    ours = ChatTemplate.load(folder, load_tokenizer(folder).special_tokens)
    return ours, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (CHATML, [USER], {}),
        (CHATML, TALK, {}),
        (LLAMA3, [USER], {}),
        (LLAMA3, TALK, {"custom_date": "1 Jan 2025"}),
        (LLAMA3, TALK, {"tools": [TOOL]}),
        (LLAMA3, CALLS, {"tools": [TOOL]}),
        (MISTRAL, TALK, {}),
        (CONTROLS, TALK, {}),
        (CONTROLS, [USER], {"flag": True, "documents": [{"title": "T", "text": "x"}]}),
        (CONTROLS, [USER, {"role": "assistant", "content": "a", "thinking": "hm"}], {}),
        (CONTROLS, [USER], {"bos_token": "other", "pad_token": "x"}),
    ],
)
def test_equals_transformers(template, messages, options, add_generation_prompt, folder):
    set_config(folder, chat_template=template)
    ours, theirs = both(folder)
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
    )
    known = {key: options[key] for key in ("tools", "documents") if key in options}
    others = {key: value for key, value in options.items() if key not in known}
    text = ours.render(
        messages, add_generation_prompt=add_generation_prompt, template_kwargs=others, **known
    )
    assert text == expected
    assert text.strip()


def test_named_templates(folder):
    named = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ tools | length }}"},
    ]
    set_config(folder, chat_template=named)
    ours, theirs = both(folder)
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template([USER], tools=tools, tokenize=False)
        assert ours.render([USER], tools=tools) == expected
    assert ours.render([USER], tools=[]).startswith("D")


def test_file_comes_before_the_config(folder):
    set_config(folder, chat_template="config")
    assert both(folder)[0].render([USER]) == "config"
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert both(folder)[0].render([USER]) == "json"
    (folder / "chat_template.jinja").write_text("jinja{{ eos_token }}\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    ours, theirs = both(folder)
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template([USER], tools=tools, tokenize=False)
        assert ours.render([USER], tools=tools) == expected


def test_strftime_now():
    template = ChatTemplate(
        {"default": "{{ strftime_now('%d %b %Y') }}"},
        now=lambda: datetime.datetime(2024, 7, 26),
    )
    assert template.render([USER]) == "26 Jul 2024"


def test_text_parts_are_joined():
    template = ChatTemplate({"default": "{{ messages[0].content }}"})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"
    assert template.render([{"role": "user", "content": parts[:1]}]) == "a"


def test_developer_is_system_where_a_template_does_not_know_it():
    message = {"role": "developer", "content": "x"}
    assert ChatTemplate({"default": "{{ messages[0].role }}"}).render([message]) == "system"
    knowing = ChatTemplate({"default": "{{ messages[0].role == 'developer' }}"})
    assert knowing.render([message]) == "True"
    assert message["role"] == "developer"


def test_arguments_of_tool_calls_become_objects():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments.a[0] }}"
    assert ChatTemplate({"default": template}).render(messages) == "1"
    assert call["function"]["arguments"] == '{"a": [1]}'


@pytest.mark.parametrize(
    "arguments",
    ["", '{"a": "\\', '{"a": 1}</tool_call>', "{x", "[1]", "1", "null", "[" * 9999, None, [1], 1],
    ids=lambda value: str(value)[:20],
)
def test_arguments_of_a_broken_call_are_none(arguments):
    """Clients send what the server returned back, in each later turn."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert ChatTemplate({"default": template}).render(messages) == "{}"


@pytest.mark.parametrize("absent", [{"tool_calls": []}, {"tool_calls": None}])
def test_an_empty_list_of_calls_is_absent(absent):
    template = ChatTemplate({"default": "{{ messages[0].tool_calls is defined }}"})
    message = {"role": "assistant", "content": "Hi.", "function_call": None, **absent}
    assert template.render([message]) == "False"
    with refused(
        InvalidRequestError, "messages[0].content", "tool_calls", param="messages[0].content"
    ):
        template.render([{"role": "assistant", **absent}])


def test_no_template(folder):
    template = ChatTemplate.load(folder)
    assert not template.exists
    with refused(InvalidRequestError, "/v1/completions", "chat_template.jinja", param="messages"):
        template.render([USER])


def test_only_a_tool_template():
    with refused(InvalidRequestError, "tool_use", param="messages"):
        ChatTemplate({"tool_use": ""}).render([USER])


def test_the_template_refuses(folder):
    set_config(folder, chat_template=MISTRAL)
    with pytest.raises(InvalidRequestError, match="refuses these messages: roles must alternate"):
        ChatTemplate.load(folder, {"bos_token": "<s>", "eos_token": "</s>"}).render([USER, USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].absent.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content + 1 }}",
        "{{ messages[0] | tojson(indent=messages) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_the_template_fails(template):
    with refused(InvalidRequestError, "template", param="messages"):
        ChatTemplate({"default": template}).render([USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ range.__globals__ + 1 }}",
        "{% set range.more = 10 %}",
        "{{ lipsum() }}",
    ],
)
def test_the_sandbox_holds(template):
    with refused(InvalidRequestError, "template", param="messages"):
        ChatTemplate({"default": template}).render([USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(9999999999) %}{% endfor %}", "Range too big"),
        ("{{ 10 ** 100000 }}", "Exceeds the limit"),
        ("{{ raise_exception('e' * 3000) }}", r"refuses these messages: e+\.\.\.e+$"),
        ("{% for i in range(600) %}{{ 'ab' }}{% endfor %}", "text of more than 1000 characters"),
    ],
)
def test_limits(template, message):
    with pytest.raises(InvalidRequestError, match=message):
        ChatTemplate({"default": template}, max_rendered_chars=1000).render([USER])


@pytest.mark.parametrize(
    ("messages", "param", "named"),
    [
        ("Hi", "messages", ("messages",)),
        ([], "messages", ("messages",)),
        (["Hi"], "messages[0]", ("messages[0]",)),
        ([USER, {"content": "x"}], "messages[1].role", ("messages[1].role", "system")),
        ([{"role": "bot", "content": "x"}], "messages[0].role", ("bot", "messages[0].role")),
        (
            [{"role": ["user"], "content": "x"}],
            "messages[0].role",
            ("['user']", "messages[0].role"),
        ),
        ([{"role": "user"}], "messages[0].content", ("messages[0]",)),
        ([{"role": "user", "content": None}], "messages[0].content", ("messages[0]",)),
        ([{"role": "assistant", "content": None}], "messages[0].content", ("messages[0]",)),
        ([{"role": "user", "content": 5}], "messages[0].content", ("messages[0].content",)),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", ("str",)),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
            ("image_url", "text", "messages[0].content[0].type"),
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            ("messages[0].content[0].text",),
        ),
        (
            [{"role": "assistant", "tool_calls": 1}],
            "messages[0].tool_calls",
            ("messages[0].tool_calls",),
        ),
        (
            [{"role": "assistant", "tool_calls": [{}]}],
            "messages[0].tool_calls[0]",
            ("function", "messages[0].tool_calls[0]"),
        ),
    ],
)
def test_bad_messages(messages, param, named):
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate({"default": "x"}).render(messages)
    assert caught.value.param == param
    assert param in caught.value.message
    assert re.search(naming(*named), caught.value.message)


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_bad_tools_and_documents(name):
    with pytest.raises(InvalidRequestError, match=naming(name)):
        ChatTemplate({"default": "x"}).render([USER], **{name: ["f"]})


def test_broken_templates(folder):
    set_config(folder, chat_template="a\n{% if %}")
    with pytest.raises(ConfigError, match=naming(2)):
        ChatTemplate.load(folder)
    set_config(folder, chat_template="{{ 1 | no_such_filter }}")
    with pytest.raises(ConfigError, match="no_such_filter"):
        ChatTemplate.load(folder)
    set_config(folder, chat_template=[{"name": "default"}])
    with pytest.raises(ConfigError, match=naming("chat_template")):
        ChatTemplate.load(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTemplate.load(folder)
