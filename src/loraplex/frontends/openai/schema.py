"""Request bodies of the OpenAI API, with the fields of the servers that loraplex replaces.

Types are strict (no "5" for 5) and every field may be null, which means absent. Ranges are not
checked here: SamplingParams knows them. A field that is not declared is kept aside:
`unsupported` names those that we know and do not serve; TextContext.refuse_extra refuses the rest.
The text under a field is its row's note in docs/fields-openai.md.
"""

from collections.abc import Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,  # typing's own is too old before Python 3.12
    TypeVar,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    with_config,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from loraplex.core.sampling_params import RANGES, Range

EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
    "messages": "a list of messages",
    "messages[]": "an object with a role and a content",
    "messages[].content": "a string or a list of content parts",
    "stop_token_ids": "a list of token ids",
    "tokens": "a list of token ids",
    "allowed_token_ids": "a list of token ids",
    "logit_bias": "an object of token ids and numbers",
    "bad_words": "a string or a list of strings",
    "guided_json": "a JSON schema",
    "json_schema": "a JSON schema",
    "tool_choice": "none, auto, required, or an object that names functions",
    "lora_path": "an adapter's name, or a list with a name or null for each prompt",
    "guided_choice": "a list of strings",
    "early_stopping": 'true, false or "never"',
    "entries[].prompt": "a string or a list of token ids",
    "entries[].messages": "a list of messages",
    "entries[].messages[]": "an object with a role and a content",
    "entries[].messages[].content": "a string or a list of content parts",
    "input": "a text or a list of items",
}
"""What is right where a field takes more than one type: texts for an error message."""

MAX_MESSAGES = 8192
MAX_TOKEN_LISTS = 4096
MAX_LOGIT_BIASES = 8192
"""Tokens with a bias: allowed_token_ids is the field for most of a vocabulary."""

TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# One bad item ends a branch: a prompt of a million token ids is not a million errors.
Prompt = Annotated[
    str
    | Texts
    | TokenIds
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_TOKEN_LISTS)],
    Field(union_mode="left_to_right"),
]


class JsonBody(BaseModel):
    """A JSON object of which unknown fields end up in `model_extra`."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, use_attribute_docstrings=True
    )
    expected: ClassVar[Mapping[str, str]] = {}
    """Texts that replace those of EXPECTED here."""


class ClosedBody(JsonBody):
    """Body in which an unknown field is an error; see refuse_unknown."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})


def _limits(limits: Range) -> JsonSchemaValue:
    low = "exclusiveMinimum" if limits.is_above_low else "minimum"
    return {low: limits.low, "maximum": limits.high}


class StreamOptions(JsonBody):
    include_usage: bool | None = None
    """A last chunk has the usage; all others have `usage: null`."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the usage so far, if include_usage is set."""


class SamplingBody(JsonBody):
    """What everything that generates has in common: how tokens are drawn, and when it ends."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Schema with the ranges of SamplingParams."""
        schema = handler(core_schema)
        for name, field in handler.resolve_ref_schema(schema)["properties"].items():
            for form in field.get("anyOf", ()):
                if name in RANGES and form["type"] in ("integer", "number"):
                    form.update(_limits(RANGES[name]))
        return schema

    model: str | None = None
    """A base model, an adapter, or `base:adapter`; absent: the first base model."""
    load_lora_weights: Literal["auto", "always", "never"] | None = None
    """`auto` loads the adapter if it is not in memory; `always` reads its source again; `never`
    refuses the request if the adapter is not in memory."""
    max_tokens: int | None = None
    """Default: 16 in a completion; in a chat, the rest of the model's maximum length."""
    min_tokens: int | None = None
    """No end or stop token before."""
    temperature: float | None = None
    """0 to 100; 0 is greedy."""
    top_p: float | None = None
    """More than 0, at most 1."""
    top_k: int | None = None
    """-1 and 0 are all tokens."""
    min_p: float | None = None
    """0 to 1."""
    repetition_penalty: float | None = None
    """More than 0, at most 100."""
    presence_penalty: float | None = None
    """-2 to 2."""
    frequency_penalty: float | None = None
    """-2 to 2."""
    seed: int | None = None
    """64 bits; equal seeds give equal draws, independent of other requests."""
    stop: str | Texts | None = None
    """Up to 64 texts of up to 4096 characters, found across tokens."""
    stop_token_ids: TokenIds | None = None
    """Up to 1024."""
    include_stop_str_in_output: bool | None = None
    """Include the stop string or token in the output."""
    no_stop_trim: bool | None = None
    """Synonym of include_stop_str_in_output."""
    ignore_eos: bool | None = None
    """The model's end token does not end the output."""
    ignore_eos_token: bool | None = None
    """Synonym of ignore_eos."""
    skip_special_tokens: bool | None = None
    """False: special tokens are part of the text."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer puts its first tokens (BOS) before the prompt: true in a completion,
    false in a chat, whose template writes them."""
    top_p_decay: float | None = None
    """Each new token multiplies top_p with this, down to top_p_min."""
    top_p_min: float | None = None
    """See top_p_decay."""
    top_p_reset_ids: int | None = None
    """After this token, top_p is what it was."""
    no_repeat_ngram_size: int | None = None
    """No n-gram of this size occurs twice, in prompt and output together."""
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    """-100 to 100, by token id in decimal; up to 8192 tokens."""
    allowed_token_ids: TokenIds | None = None
    """Only these are chosen."""
    bad_words: str | Texts | None = None
    """Texts that are not to come."""
    response_format: dict[str, Any] | None = None
    """Type text, json_object (with or without a schema), json_schema (enforced, strict or not),
    regex, ebnf, lark_grammar or llguidance."""
    structured_outputs: dict[str, Any] | None = None
    """Object with json, json_object, regex, choice or grammar."""
    guided_json: str | dict[str, Any] | bool | None = None
    """Synonym of structured_outputs.json."""
    guided_regex: str | None = None
    """Synonym of structured_outputs.regex."""
    guided_choice: Texts | None = None
    """Synonym of structured_outputs.choice."""
    guided_grammar: str | None = None
    """Synonym of structured_outputs.grammar: GBNF if it has `::=`, else Lark."""
    json_schema: str | dict[str, Any] | bool | None = None
    """Synonym of structured_outputs.json."""
    regex: str | None = None
    """Synonym of structured_outputs.regex."""
    ebnf: str | None = None
    """A grammar as GBNF writes it."""
    num_draft_tokens: int | None = None
    """Maximum number of draft tokens (prompt lookup); 0: none. Default: the server's setting."""
    priority: int | None = None
    """Lower is sooner; 0 is usual."""
    timeout_seconds: float | None = None
    """The request ends with an error when the time is up."""


class AdapterFields(JsonBody):
    """Adapters of what is requested."""

    lora_model: str | None = None
    """An adapter of the base model."""
    adapter_id: str | None = None
    """Synonym of lora_model."""
    lora_path: str | Annotated[list[str | None], Field(fail_fast=True)] | None = None
    """Synonym of lora_model (a name, not a path); a list has one per prompt, null for the base."""
    lora_scale: float | None = None
    """How strongly the one adapter is applied; 1 if it is absent."""
    adapters: list[Any] | None = None
    """Several, added up: names, or objects with name, task_id or digest, and scale."""


class AdaptedBody(SamplingBody, AdapterFields):
    """Sampling fields and adapters."""


class GenerationBody(AdaptedBody):
    """What completions and chat have in common."""

    n: int | None = None
    """Number of outputs, 1 to 128."""
    best_of: int | None = None
    """Number of outputs to generate; the n likeliest are returned. With beams, their number."""
    use_beam_search: bool | None = None
    """The beams are beam_width, or best_of, or n."""
    beam_width: int | None = None
    """See use_beam_search."""
    length_penalty: float | None = None
    """Beam search: a score is divided by the length to this power."""
    early_stopping: bool | Literal["never"] | None = None
    """Beam search: true, false or "never"."""
    beam_search_diversity_rate: float | None = None
    """Beam search: TensorRT-LLM's diversity rate."""
    prompt_logprobs: int | None = None
    """Up to 20 likely tokens at each position of the prompt; not with stream."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many tokens of a longer prompt; -1: the most that fit."""
    truncation_side: Literal["left", "right"] | None = None
    """Where truncate_prompt_tokens takes tokens away; left if absent."""
    cache_salt: str | None = None
    """1 to 1024 characters: only requests with an equal one share KV blocks."""
    stream: bool | None = None
    """Server-sent events, `data: [DONE]` at the end."""
    stream_options: StreamOptions | None = None
    """Only with stream."""
    return_tokens_as_token_ids: bool | None = None
    """Tokens of log probabilities are written as `token_id:5`."""
    return_token_ids: bool | None = None
    """Return `token_ids` of each output and `prompt_token_ids` in addition to the text."""
    return_expanded_prompt: bool | None = None
    """Return `expanded_prompt`: the prompt with the template and its special tokens."""
    llg_log_level: Literal["none", "warning", "json", "verbose"] | None = None
    """No effect: what is wrong with a grammar is said in an error."""
    request_id: str | None = None
    """Id of the response, if there is no x-request-id header."""
    rid: str | None = None
    """Synonym of request_id."""


class CompletionBody(GenerationBody):
    prompt: Prompt
    """A text, a list of texts, token ids, or a list of these; up to 256."""
    logprobs: int | None = None
    """Number of likely tokens returned for each position, the end token's too; up to 20."""
    echo: bool | None = None
    """The output begins with the prompt. Refused for models with an encoder."""
    decoder_prompt: str | list[int] | None = None
    """Models with an encoder: beginning of the output, a text without special tokens or ids."""
    forced_bos_token_id: int | None = None
    """Models with an encoder: token after the first one, such as a target language."""


_Element = TypeVar("_Element")


def _let_others_run(element: _Element) -> _Element:
    """Do nothing: while pydantic parses, other threads run only where it calls Python."""
    return element


_AS_SENT = ConfigDict(strict=True, extra="allow")


@with_config(_AS_SENT)
class ContentPart(TypedDict):
    """One part of a message as the client sent it."""

    type: str
    text: NotRequired[str | None]


ContentParts = list[Annotated[ContentPart, AfterValidator(_let_others_run)]]


@with_config(_AS_SENT)
class Message(TypedDict):
    """One turn as the client sent it, with any further fields for the chat template."""

    role: str
    content: NotRequired[str | Annotated[ContentParts, Field(fail_fast=True)] | None]
    tool_calls: NotRequired[Any]
    tool_call_id: NotRequired[Any]


Messages = Annotated[
    list[Annotated[Message, AfterValidator(_let_others_run)]],
    Field(fail_fast=True, max_length=MAX_MESSAGES),
]


class ChatBody(GenerationBody):
    messages: Messages
    """1 to 8192, of the roles system, developer, user, assistant and tool; content is a text or a
    list of text parts."""
    max_completion_tokens: int | None = None
    """Synonym of max_tokens; not both."""
    tools: list[Any] | None = None
    """Up to 128 functions; `strict` ones and required ones are enforced by a grammar. Tools of
    OpenAI's other types are left out, with a note in the response's `loraplex.notes`."""
    tool_choice: str | dict[str, Any] | None = None
    """none, auto, required, a named function, or OpenAI's allowed_tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in a message."""
    reasoning_effort: str | None = None
    """A variable of the chat template; `none` also sets its enable_thinking to false."""
    include_reasoning: bool | None = None
    """False: the model's reasoning is left out."""
    separate_reasoning: bool | None = None
    """False: it is a part of the content, with its tags."""
    logprobs: bool | None = None
    """Return the log probability of each output token, including the end token."""
    top_logprobs: int | None = None
    """0 to 20; needs logprobs."""
    echo: bool | None = None
    """The output begins with the last message, if that has the output's role."""
    add_generation_prompt: bool | None = None
    """False: the template does not begin the assistant's turn."""
    continue_final_message: bool | None = None
    """The model goes on with the last message; not with add_generation_prompt."""
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Documents for templates that use them."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables of the chat template."""
    include_json_schema_in_prompt: bool | None = None
    """True: the template sees the schema of response_format as `json_schema`; false: it sees
    neither that nor tools."""
    return_prompt_text: bool | None = None
    """Return `prompt_text`: the rendered template."""


class PooledBody(AdapterFields, ClosedBody):
    """What routes of vectors, labels and scores have in common."""

    model: str | None = None
    """A base model, an adapter, or `base:adapter`; absent: the first base model."""
    user: str | None = None
    """No effect: tenants are distinguished by their API keys."""
    add_special_tokens: bool | None = None
    """False: the tokenizer puts no tokens before or after a text."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many tokens of a longer text, with those that the tokenizer puts around it; -1:
    the most that fit."""
    truncation_side: Literal["left", "right"] | None = None
    """Where truncate_prompt_tokens takes tokens away; right if absent."""
    load_lora_weights: Literal["auto", "always", "never"] | None = None
    """Same as in a completion."""
    cache_salt: str | None = None
    """Same as in a completion."""
    priority: int | None = None
    """Lower is sooner; 0 is usual."""
    timeout_seconds: float | None = None
    """The request ends with an error when the time is up."""
    request_id: str | None = None
    """Id of the response, if there is no x-request-id header."""


class EmbeddingBody(PooledBody):
    """POST /v1/embeddings, with fields of vLLM and of sentence-transformers."""

    expected = {"input": "a string, a list of strings, a list of token ids or a list of such lists"}

    input: Prompt
    """A text, a list of texts, token ids, or a list of these; up to 2048."""
    encoding_format: Literal["float", "base64"] | None = None
    """`float` is a list of numbers, `base64` their bytes: float32, little-endian. Default: float;
    the openai package requests base64."""
    dimensions: int | None = None
    """Keep so many first values, and divide by the length that is left."""
    normalize: bool | None = None
    """Divide by the length; absent: as the model's folder states, and true with `dimensions`."""
    use_activation: bool | None = None
    """Synonym of normalize."""
    prompt_name: str | None = None
    """The prompt that is put before each text, of the adapter's folder if it has prompts, else of
    the model's; absent: its default."""


class ClassifyBody(PooledBody):
    """POST /classify of vLLM."""

    expected = {"input": "a string, a list of strings, a list of token ids or a list of such lists"}

    input: Prompt | None = None
    """A text, a list of texts, token ids, or a list of these; up to 2048. This or messages."""
    messages: Messages | None = None
    """A conversation, as in a chat: it is classified as one text."""
    use_activation: bool | None = None
    """False: scores instead of probabilities."""
    add_special_tokens: bool | None = None
    """Tokens that the tokenizer puts around a text; true for input and false for messages, if it is
    absent."""
    add_generation_prompt: bool | None = None
    """The template of messages writes the beginning of the assistant's turn; false if absent."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Same as in a chat."""


class PoolingBody(EmbeddingBody):
    """POST /pooling of vLLM."""

    task: str | None = None
    """`embed` (the default) gives vectors, `classify` the values of the classification head."""
    use_activation: bool | None = None
    """Synonym of normalize; of labels: false gives the head's values as they are."""


class TruncatedBody(PooledBody):
    """What routes of Text Embeddings Inference have in common."""

    truncate: bool | None = None
    """Cut texts that are too long; else they are errors."""
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    """Where tokens are taken away; Right if absent."""


class TeiEmbedBody(TruncatedBody):
    """POST /embed of Text Embeddings Inference."""

    expected = {"inputs": "a string or a list of strings"}

    inputs: str | Texts
    """A text or a list of texts, up to 2048."""
    normalize: bool | None = None
    """Divide by the length; true if absent."""
    prompt_name: str | None = None
    """The prompt that is put before each text, of the adapter's folder if it has prompts, else of
    the model's; absent: its default."""
    dimensions: int | None = None
    """Keep so many first values, and divide by the length that is left."""


class TeiPredictBody(TruncatedBody):
    """POST /predict of Text Embeddings Inference."""

    expected = {"inputs": "a string, or a list of lists of one string each"}

    inputs: str | Annotated[list[Texts], Field(fail_fast=True)]
    """A text, or a list with a list of one text each, up to 2048."""
    raw_scores: bool | None = None
    """The values of the classification head as they are; else probabilities."""


class CohereEmbedBody(PooledBody):
    """POST /v2/embed of Cohere."""

    texts: Texts
    """Up to 2048."""
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering"] | None
    ) = None
    """Which prompt of the model's folder is put before each text: `query`, `document` (or
    `passage`, `corpus`), `classification` or `clustering`, if it has that one; else its default."""
    embedding_types: (
        Annotated[list[Literal["float", "base64", "binary", "ubinary"]], Field(fail_fast=True)]
        | None
    ) = None
    """`float` if absent. `binary` and `ubinary` have the signs of the values, eight in a byte."""
    output_dimension: int | None = None
    """Keep so many first values, and divide by the length that is left."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """Where texts that are too long are cut; END if absent, NONE: they are errors."""
    max_tokens: int | None = None
    """Longer texts are too long; absent: as many tokens as the model takes."""


class PairBody(PooledBody):
    """What routes have in common that score pairs of a query and a document."""

    instruction: str | None = None
    """What the model is to look for, if its prompt has a place for it; absent: the model's own."""
    max_tokens_per_query: int | None = None
    """Cut queries to so many tokens; for embedding models only."""
    max_tokens_per_doc: int | None = None
    """Cut documents to so many tokens; what stands after them in the prompt stays."""
    use_activation: bool | None = None
    """False: what the model yields, without the sigmoid."""


class ScoreBody(PairBody):
    """POST /score of vLLM, and of SGLang if it has `label_token_ids`."""

    expected = {
        "items": "a string, a list of strings or a list of lists of token ids",
        "query": "a string or a list of token ids",
        **dict.fromkeys(
            ("queries", "documents", "text_1", "text_2", "data_1", "data_2"),
            "a string or a list of strings",
        ),
    }

    queries: str | Texts | None = None
    """One, for all documents, or one for each."""
    documents: str | Texts | None = None
    """A text or a list of texts, up to 2048; goes with `queries`."""
    text_1: str | Texts | None = None
    """Synonym of queries, with `text_2`."""
    text_2: str | Texts | None = None
    """Synonym of documents, with `text_1`."""
    data_1: str | Texts | None = None
    """Synonym of queries, with `data_2`."""
    data_2: str | Texts | None = None
    """Synonym of documents, with `data_1`."""
    items: (
        str
        | Texts
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_TOKEN_LISTS)]
        | None
    ) = None
    """Synonym of documents; with `label_token_ids` each follows the query."""
    query: str | TokenIds | None = None
    """SGLang's, with `label_token_ids`: stands before each item."""
    label_token_ids: TokenIds | None = None
    """SGLang's: the tokens whose probabilities after query and item are returned."""
    apply_softmax: bool | None = None
    """SGLang's: the probabilities of these tokens add up to 1; else they are those among all tokens
    of the model."""
    item_first: bool | None = None
    """SGLang's: each item stands before the query."""


class RerankBody(PairBody, TruncatedBody):
    """POST /rerank of vLLM, Jina and Cohere, and of Text Embeddings Inference if it has `texts`."""

    expected = {
        "documents": "a list of strings or of objects with a text",
        "documents[]": "a string or an object with a text",
    }

    query: str
    """What the documents are ranked by."""
    documents: Annotated[list[str | dict[str, str]], Field(fail_fast=True)] | None = None
    """Texts, or objects with a `text`; up to 2048."""
    top_n: int | None = None
    """Return so many of the best; 0 or absent: all."""
    return_documents: bool | None = None
    """Return the documents, too; absent: true, but false in /v2/rerank."""
    texts: Texts | None = None
    """TEI's name of documents; the response then has TEI's form."""
    raw_scores: bool | None = None
    """TEI's: the same as use_activation with the other value."""
    return_text: bool | None = None
    """TEI's: return the texts, too."""


class CompareEntryBody(ClosedBody):
    """One output of POST /v1/compare, with a prompt or a conversation of its own."""

    adapters: Any = None
    """Null for the base model, an adapter, or a list of adapters."""
    prompt: Prompt | None = None
    """One; this or messages."""
    messages: Messages | None = None
    seed: int | None = None
    """Default: the `seed` of the request."""


class CompareBody(SamplingBody, ClosedBody):
    """POST /v1/compare: a prompt or a conversation for all adapters, or one for each output."""

    prompt: Prompt | None = None
    """One."""
    messages: Messages | None = None
    adapters: list[Any] | None = None
    """One output each: null for the base model, an adapter, or a list of adapters."""
    entries: Annotated[list[CompareEntryBody], Field(fail_fast=True)] | None = None
    """One output each, with its own prompt or messages, in place of `adapters`, `prompt` and
    `messages`."""
    logprobs: int | None = None
    """Number of likely tokens returned for each position."""
    stream: bool | None = None
    """Server-sent events of all outputs as they come, `data: [DONE]` at the end."""
    tools: list[Any] | None = None
    """Same as in a chat; only with messages."""
    tool_choice: str | dict[str, Any] | None = None
    """Same as in a chat."""
    parallel_tool_calls: bool | None = None
    """Same as in a chat."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Same as in a chat; only with messages."""
    chat_template_kwargs: dict[str, Any] | None = None


class CancelBody(ClosedBody):
    """POST /v1/compare/{id}/cancel."""

    index: int
    """The output that is to end."""


class TokenizeBody(JsonBody):
    """vLLM's: a prompt or a conversation."""

    model: str | None = None
    """A base model or one of its adapters; absent: the first base model."""
    prompt: str | None = None
    """This or messages."""
    messages: Messages | None = None
    """Same as in a chat."""
    add_special_tokens: bool | None = None
    """True for a prompt and false for messages, if it is absent."""
    add_generation_prompt: bool | None = None
    """Same as in a chat."""
    continue_final_message: bool | None = None
    """Same as in a chat."""
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Same as in a chat."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Same as in a chat."""
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Tools as the template renders them."""
    return_token_strs: bool | None = None
    """`token_strs` has the text of each token."""


class DetokenizeBody(JsonBody):
    model: str | None = None
    """A base model or one of its adapters; absent: the first base model."""
    tokens: TokenIds
    """Special ones become part of the text."""
