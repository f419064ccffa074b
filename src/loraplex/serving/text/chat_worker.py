"""Sandbox process that renders the chats of one model."""

import json

from loraplex.serving.sandbox import worker
from loraplex.serving.text.chat_template import ChatTemplate


def make_task(setup: bytes) -> worker.Task:
    """Return the function which renders one chat; both messages are arguments as JSON."""
    template = ChatTemplate(**json.loads(setup))

    def render(request: bytes) -> bytes:
        text = template.render(**json.loads(request))
        # Half of a surrogate pair is for the tokenizer to refuse, with its place in the text.
        return text.encode(errors="surrogatepass")

    return render


if __name__ == "__main__":
    worker.main(make_task)
