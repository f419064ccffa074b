"""docs/options.md lists every option, under every name that it has."""

from pathlib import Path

import pytest

from loraplex.core.sampling_params import SamplingParams
from loraplex.core.support import Support
from loraplex.frontends.kserve.models.kinds import ENSEMBLE, TENSORRT_LLM
from loraplex.frontends.openai.responses import Timing

PAGE = (Path(__file__).parents[3] / "docs" / "options.md").read_text(encoding="utf-8")
ELSEWHERE = {"skip_special_tokens"}


def test_every_field_of_the_library():
    fields = set(SamplingParams.__struct_fields__) - ELSEWHERE
    assert [name for name in sorted(fields) if f"`{name}`" not in PAGE] == []


def test_every_part_of_the_timing():
    assert [name for name in Timing.__struct_fields__ if f'"{name}"' not in PAGE] == []


PROTOCOL = {
    *("input_ids", "input_lengths", "text_input", "stop", "streaming", "stream"),
    *("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens"),
    *("lora_task_id", "lora_weights", "lora_config", "return_perf_metrics"),
}
"""Fields that are no decoding options: inputs, and the form of the response."""
SHORTENED = ("runtime_top_p_", "top_p_", "retention_")
"""Names that the page gives by their beginning or end."""


@pytest.mark.parametrize("kind", [TENSORRT_LLM, ENSEMBLE], ids=lambda kind: kind.name)
def test_every_tensor_that_is_used(kind):
    names = {row.name for row in kind.inputs if row.support is Support.WORKS} - PROTOCOL
    listed = [name for name in sorted(names) if not name.startswith(SHORTENED)]
    assert [name for name in listed if f"`{name}`" not in PAGE] == []
