"""OpenAI's Responses API: `/v1/responses`, its objects, its events, and what is kept of them.

Composed of the chat's parts: a body becomes a chat body (`convert`, `input_items`), an output is
parsed by the chat's reader and written as items (`output_items`, `writer`).
"""
