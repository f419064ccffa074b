"""Program that test_lorax runs where lorax-client is installed; it prints the responses."""

import json
import sys

from lorax import Client
from lorax.errors import ValidationError

client = Client(sys.argv[1])
whole = client.generate("hi", adapter_id="fr", max_new_tokens=50, details=True)
stream = list(client.generate_stream("hi", max_new_tokens=50))
try:
    client.generate("hi", temperature=1000.0)
except ValidationError as caught:
    error = str(caught)
print(
    json.dumps(
        {
            "whole": whole.generated_text,
            "tokens": "".join(token.text for token in whole.details.tokens if not token.special),
            "finish_reason": whole.details.finish_reason,
            "stream": "".join(r.token.text for r in stream if not r.token.special),
            "last": stream[-1].generated_text,
            "error": error,
        }
    )
)
