"""Run by test_openai_clients in a process that has guidance: prints what it captured."""

import json
import sys

from guidance import assistant, gen, select, user
from guidance import json as json_output
from guidance.models.experimental import VLLMModel

url, model = sys.argv[1:]
lm = VLLMModel(model=model, echo=False, base_url=url, api_key="none")
with user():
    lm += "What is the capital of France?"
with assistant():
    lm += select(["Paris", "Rome"], name="city")
with user():
    lm += "And a number?"
with assistant():
    lm += "number: " + gen("number", regex="[1-9][0-9]{2}")
with user():
    lm += "As JSON?"
with assistant():
    lm += json_output(
        "object",
        schema={
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    )
print(json.dumps({name: lm[name] for name in ("city", "number", "object")}))
