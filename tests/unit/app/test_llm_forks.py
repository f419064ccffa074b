"""An LLM in a process that was forked from the one that made it: an error, and never a hang."""

import pickle
import subprocess
import sys

import pytest

from loraplex import LLM, AsyncLLM

PROGRAM = """
import asyncio, multiprocessing, os, sys
from loraplex import AsyncLLM, ConfigError, LLM, SamplingParams
from loraplex.demo import BASE_PATH

few = SamplingParams(max_tokens=4)
llm = LLM(BASE_PATH, state_dir=sys.argv[1], kv_cache_bytes="8MiB", num_threads=2)
other = AsyncLLM(BASE_PATH)
other._started = llm._model
parent = os.getpid()


def attempts():
    yield lambda: llm.generate("Hello", few)
    yield lambda: llm.chat([{"role": "user", "content": "Hello"}], few)
    yield lambda: next(llm.stream("Hello", few))
    yield lambda: llm.compare("Hello", [None])
    yield lambda: llm.add_adapter("zh", "path")
    yield lambda: llm.remove_adapter("zh")
    yield lambda: llm.adapter("zh")
    yield llm.adapters
    yield llm.stats
    yield lambda: llm.has_chat_template
    yield lambda: asyncio.run(other.generate("Hello", few))
    yield lambda: asyncio.run(anext(other.stream("Hello", few)))
    yield other.stats


def refusals(_=None):
    found = []
    for attempt in attempts():
        try:
            attempt()
        except ConfigError as error:
            assert f"made in process {parent}" in str(error), error
            assert f"process {os.getpid()}," in str(error), error
            found.append(str(error))
    llm.close()
    return len(found)


num = len(list(attempts()))
llm.generate("Hello", few)
llm._model.loop._lock.acquire()  # as if another thread had been at work
child = os.fork()
if child == 0:
    sys.exit(refusals())  # which runs what is registered for the exit
llm._model.loop._lock.release()
_, status = os.waitpid(child, 0)
with multiprocessing.get_context("fork").Pool(2) as pool:
    in_pool = pool.map(refusals, range(2))
print(num == os.waitstatus_to_exitcode(status) == in_pool[0] == in_pool[1])
print(len(llm.generate(["Hello"] * 2, few)))
"""


def test_each_method_is_refused_in_a_child_and_works_in_the_parent(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.returncode) == ("True\n2\n", 0), done.stderr


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_none_is_sent_to_another_process(kind):
    with pytest.raises(TypeError, match="make one in that process"):
        pickle.dumps(kind.__new__(kind))
