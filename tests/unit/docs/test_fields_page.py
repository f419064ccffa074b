"""docs/fields-openai.md has a row for every field that a client of a replaced system may send."""

import typing

import openai.types.chat.chat_completion_stream_options_param as openai_stream_options
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completions
import openai.types.embedding_create_params as openai_embeddings
import openai.types.responses.response_create_params as openai_responses
import pytest

from loraplex.core.support import Support
from loraplex.frontends.openai.responses_api.refusals import BY_FIELD as RESPONSES_REFUSED
from loraplex.frontends.openai.responses_api.schema import Reasoning, ResponsesBody, TextConfig
from loraplex.frontends.openai.sampling import SYNONYMS
from loraplex.frontends.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    StreamOptions,
    TokenizeBody,
)
from loraplex.frontends.openai.unsupported import REFUSED, WITHOUT_EFFECT
from tools import openai_names as names
from tools.openai_page import feature, sections

UNSERVED = [row.field for row in REFUSED] + [
    row.name for row in WITHOUT_EFFECT if not row.name.startswith("stream_options.")
]
FOR_CHAT_ONLY = {"tools", "tool_choice", "functions", "function_call"}
"""Refused in completions, served in chat."""


def fields_of(*types: type) -> set[str]:
    """Fields of typed dictionaries."""
    return {field for one in types for field in typing.get_type_hints(one)}


@pytest.mark.parametrize(
    ("package", "listed"),
    [
        (
            fields_of(
                openai_completions.CompletionCreateParamsNonStreaming,
                openai_completions.CompletionCreateParamsStreaming,
            ),
            names.OPENAI_COMPLETIONS,
        ),
        (
            fields_of(
                openai_chat.CompletionCreateParamsNonStreaming,
                openai_chat.CompletionCreateParamsStreaming,
            ),
            names.OPENAI_CHAT,
        ),
        (
            fields_of(openai_stream_options.ChatCompletionStreamOptionsParam),
            [name.removeprefix("stream_options.") for name in names.OPENAI_STREAM_OPTIONS],
        ),
        (
            fields_of(
                openai_responses.ResponseCreateParamsNonStreaming,
                openai_responses.ResponseCreateParamsStreaming,
            ),
            names.OPENAI_RESPONSES,
        ),
        (fields_of(openai_embeddings.EmbeddingCreateParams), names.OPENAI_EMBEDDINGS),
    ],
    ids=["completions", "chat", "stream_options", "responses", "embeddings"],
)
def test_the_lists_are_those_of_the_openai_package(package, listed):
    assert sorted(package) == sorted(listed)


def test_every_listed_name_has_a_row_with_a_note():
    rows = [row for section in sections() for row in section.rows]
    assert len(rows) > 200
    unnoted = [row.name for row in rows if row.support is Support.NO_EFFECT and not row.note]
    assert unnoted == []


def test_a_name_that_nothing_is_known_of_has_none():
    with pytest.raises(KeyError, match="field_of_tomorrow"):
        feature(ChatBody, "field_of_tomorrow")


@pytest.mark.parametrize(
    "body",
    [
        *(CompletionBody, ChatBody, StreamOptions, TokenizeBody, DetokenizeBody, EmbeddingBody),
        *(ResponsesBody, TextConfig, Reasoning),
    ],
)
def test_every_field_of_the_schema_says_what_it_does(body):
    assert [name for name, field in body.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_a_field_is_served_or_not(body):
    both = set(UNSERVED) & set(body.model_fields)
    assert both <= (FOR_CHAT_ONLY if body is ChatBody else set())
    assert len(UNSERVED) == len(set(UNSERVED))


def test_every_field_that_is_not_served_is_on_a_list():
    listed = {
        name
        for attribute in vars(names)
        if attribute.isupper()
        for name in getattr(names, attribute)
    }
    assert set(UNSERVED) - listed == set()


def test_synonyms_are_fields():
    for name, other in SYNONYMS.items():
        assert {name, other} <= set(CompletionBody.model_fields)


def test_no_field_of_a_response_is_both_served_and_refused():
    in_chats = {"tools", "tool_choice", "reasoning"}
    assert set(RESPONSES_REFUSED) & set(ResponsesBody.model_fields) == in_chats
