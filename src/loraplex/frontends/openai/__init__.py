"""OpenAI's API: completions, chat, models, adapters; with vLLM's and llgtrt's extensions."""

from loraplex.frontends.openai.app import openai_fallback_routes, openai_routes
from loraplex.frontends.openai.context import OpenAIOptions

__all__ = ["OpenAIOptions", "openai_fallback_routes", "openai_routes"]
