"""Sandbox process that renders the chats of one model."""

from loraplex.serving.sandbox.worker import main
from loraplex.serving.text.chat_template import make_task

if __name__ == "__main__":
    main(make_task)
