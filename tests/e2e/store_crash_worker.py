"""Changes a store at random until it is killed.

test_store_crash runs this program and never imports it. For every seed that it reads, it forks a
child (imports take longer than all the rest) and prints the child's pid, and its exit status in
the end. Before a change the child prints the store's contents and the contents after the change;
then, that it is done.
"""

import hashlib
import json
import os
import random
import sys
from pathlib import Path

from loraplex.adapters.durable_files import write_atomically
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import AdapterRef, AdapterSource, ByName
from loraplex.core.errors import AdapterNotFoundError

NAMES = ("cats", "dogs", "/etc/cows")
ALIASES = ("pets", "live")


def report(**line):
    os.write(1, json.dumps(line).encode() + b"\n")


def ref(name):
    return AdapterRef("m", "t", ByName(name))


class Worker:
    def __init__(self, state_dir, seed):
        self.state_dir = state_dir
        self.random = random.Random(seed)
        self.store = AdapterStore.open(state_dir)

    def run(self):
        changes = [self.register, self.register, self.rollback, self.remove, self.alias]
        while True:
            self.random.choice([*changes, self.pin, self.collect])(self.random.choice(NAMES))

    def expect(self, change):
        """Print the state now and as it shall be."""
        before, after = ({"names": {}, "aliases": {}} for _ in range(2))
        for state in (before, after):
            for v in self.store.list("t"):
                state["names"][v.name] = [v.number, v.digest, v.task_id]
            state["aliases"] = dict(self.store.aliases("t", "m"))
        change(after)
        report(before=before, after=after)

    def register(self, name):
        content = b"%d" % self.random.randrange(1000)
        digest = hashlib.sha256(content).hexdigest()
        path = canonical_path(self.state_dir, digest)
        if not path.exists():
            write_atomically(path, [content])

        def change(state):
            number = state["names"].get(name, [0])[0]
            state["names"][name] = [number + 1, digest, NAMES.index(name)]

        if digest in (v.digest for v in self.store.list("t") if v.name == name):
            return
        self.expect(change)
        adapter = StagedAdapter(
            source=AdapterSource(digest, str(path), len(content), ()), dtypes=(), num_tensors=1
        )
        task_id = NAMES.index(name)
        self.store.register("m", "t", name, adapter, path="/", task_id=task_id, replace=True)
        report(done=True)

    def rollback(self, name):
        try:
            history = self.store.history(ref(name))
        except AdapterNotFoundError:
            return
        target = self.random.choice(history)

        def change(state):
            number, digest, task_id = state["names"][name]
            if target.digest != digest:
                state["names"][name] = [number + 1, target.digest, task_id]

        self.expect(change)
        self.store.rollback(ref(name), target.number)
        report(done=True)

    def remove(self, name):
        def change(state):
            del state["names"][name]
            for alias in [a for a, of in state["aliases"].items() if of == name]:
                del state["aliases"][alias]

        if any(version.name == name for version in self.store.list("t")):
            self.expect(change)
            self.store.remove(ref(name))
            report(done=True)

    def alias(self, name):
        alias = self.random.choice(ALIASES)
        if any(version.name == name for version in self.store.list("t")):
            self.expect(lambda state: state["aliases"].update({alias: name}))
            self.store.alias(ref(name), alias, replace=True)
            report(done=True)

    def pin(self, name):
        try:
            version = self.random.choice(self.store.history(ref(name)))
        except AdapterNotFoundError:
            return
        self.expect(lambda state: None)
        (self.store.unpin if version.is_pinned else self.store.pin)(ref(name), version.number)
        report(done=True)

    def collect(self, name):
        self.expect(lambda state: None)
        self.store.collect_garbage((), 0)
        report(done=True)


def main(state_dir):
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            Worker(state_dir, int(line)).run()
        report(pid=pid)
        report(status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
