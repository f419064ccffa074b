"""What llgtrt's clients find here: its way to read a request, its routes, and with
--llgtrt-compat its responses.
"""

from loraplex.frontends.openai.llgtrt.compat import CompatDialect
from loraplex.frontends.openai.llgtrt.dialect import LlgtrtDialect

__all__ = ["CompatDialect", "LlgtrtDialect"]
