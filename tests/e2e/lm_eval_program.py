"""Program that test_lm_eval runs where lm-evaluation-harness is installed; it prints what the
harness scores. Standard input: (kind, arguments) of each request.
"""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models import MODEL_MAPPING

assert "local-completions" in MODEL_MAPPING
url, model, tokenizer = sys.argv[1:]
lm = get_model("local-completions")(
    model=model,
    base_url=f"{url}/v1/completions",
    tokenizer=tokenizer,
    batch_size=3,
    max_retries=1,
    max_gen_toks=24,
)
results = {}
for kind, arguments in json.load(sys.stdin).items():
    requests = [Instance(kind, {}, tuple(each), index) for index, each in enumerate(arguments)]
    results[kind] = getattr(lm, kind)(requests)
print(json.dumps(results))
