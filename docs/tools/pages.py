"""The generated files of docs/, by file name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tools.llgtrt_page import llgtrt_page
from tools.models_page import models_page
from tools.openai_page import openai_page
from tools.openapi_page import openapi_page
from tools.settings_page import settings_page
from tools.sizing_page import sizing_page
from tools.triton_page import triton_page
from tools.vllm_page import vllm_page

PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "support-triton.md": triton_page,
        "support-vllm.md": vllm_page,
        "fields-openai.md": openai_page,
        "support-llgtrt.md": llgtrt_page,
        "settings.md": settings_page,
        "models.md": models_page,
        "sizing.md": sizing_page,
    }
)
"""Files that are committed."""
BUILT: Mapping[str, Callable[[], str]] = MappingProxyType({"openapi.json": openapi_page})
"""Files that only the built documentation has."""
