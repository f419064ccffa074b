"""Changes the adapters of a server without an engine at random until it is killed.

test_store_kill runs this program and never imports it. For every seed that it reads, it forks a
child and prints the child's pid, and its exit status in the end. Before a change the child prints
the store's contents and the contents after the change; then, that it is done.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path

import msgspec
import numpy as np

from loraplex.adapters.formats.export import StorageType
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging import RequestTensor
from loraplex.adapters.staging_worker import stage
from loraplex.adapters.tensor_file import TensorHeader
from loraplex.app.builder import build_service
from loraplex.compat.convert.adapters import read_peft, write_pair
from loraplex.core.adapter import AdapterRef, ByName
from loraplex.core.config import Config, ModelConfig
from loraplex.core.plan import PageGeometry
from loraplex.core.principal import DEFAULT_TENANT, LOCAL
from loraplex.core.server_config import ServerConfig
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.serving.request_metrics import RequestMetrics
from support.fake_engine_process import FakeEngineSettings, fake_engine_thread
from support.fake_runner import FAKE_CAPACITY

MODEL = "capitals"
NAMES = ("cats", "dogs", "/etc/cows")
TASK_IDS = (0, 2**64 - 1)
NUM_VARIANTS = 4
CAPACITY = msgspec.structs.replace(
    FAKE_CAPACITY, vocab_size=1024, page_geometry=PageGeometry(1024, 4096)
)


def report(**line):
    os.write(1, json.dumps(line).encode() + b"\n")


def build(state_dir):
    config = Config(
        server=ServerConfig(state_dir=str(state_dir)),
        models={MODEL: ModelConfig(path=str(BASE_PATH))},
    )
    settings = FakeEngineSettings(capacity=CAPACITY)
    return build_service(config, lambda model: fake_engine_thread(settings), RequestMetrics())


class Variants:
    """One adapter in several strengths, as folders and as tensors, with their digests."""

    def __init__(self, folder, shapes):
        rows = read_peft(str(ADAPTER_PATHS["chinese"])).rows
        self.paths, self.tensors = [], []
        for number in range(NUM_VARIANTS):
            path = folder / f"pair-{number}"
            write_pair(rows, path, StorageType.FLOAT16)
            weights = np.load(path / "model.lora_weights.npy") * np.float16(1 + number / 4)
            config = np.load(path / "model.lora_config.npy")
            np.save(path / "model.lora_weights.npy", weights)
            self.paths.append(str(path))
            # Not the bytes of the folders.
            weights = -weights
            self.tensors.append(
                (
                    RequestTensor("FP16", weights.shape, weights.tobytes()),
                    RequestTensor("INT32", config.shape, config.tobytes()),
                )
            )
        self.path_digests = [self._stage(folder, shapes, path=path) for path in self.paths]
        self.tensor_digests = [
            self._stage(folder, shapes, path="", tensors=tensors) for tensors in self.tensors
        ]

    def _stage(self, folder, shapes, *, path, tensors=()):
        headers = [TensorHeader(t.dtype, t.shape, t.view.nbytes) for t in tensors]
        request = StageRequest(
            request_id=1,
            path=path,
            tensors=tuple(headers) or None,
            state_dir=str(folder / "scratch"),
            shapes=shapes,
        )
        return stage(request, [bytes(t.view) for t in tensors]).source.digest


class Worker:
    def __init__(self, state_dir, variants, seed):
        self.random = random.Random(seed)
        self.variants = variants
        self.service = build(state_dir)
        self.store = self.service._models[MODEL].store

    async def run(self):
        await self.service.start()
        while True:
            change = self.random.choice([self.load, self.load, self.upload, self.remove, self.roll])
            await change()

    def state(self):
        versions = self.store.list(DEFAULT_TENANT)
        return {v.name: [v.number, v.digest, v.task_id] for v in versions}

    def expect(self, name, digest, task_id=None):
        """Print the state now and as it shall be."""
        before = self.state()
        after = dict(before)
        if digest is None:
            del after[name]
        elif before.get(name, [0, ""])[1] != digest:
            after[name] = [before.get(name, [0])[0] + 1, digest, task_id]
        report(before=before, after=after)

    async def load(self):
        name, number = self.random.choice(NAMES), self.random.randrange(NUM_VARIANTS)
        self.expect(name, self.variants.path_digests[number])
        path = self.variants.paths[number]
        await self.service.adapter_admin.load(
            LOCAL, model=MODEL, name=name, path=path, replace=True
        )
        report(done=True)

    async def upload(self):
        task_id, number = self.random.choice(TASK_IDS), self.random.randrange(NUM_VARIANTS)
        self.expect(str(task_id), self.variants.tensor_digests[number], task_id)
        weights, config = self.variants.tensors[number]
        await self.service.adapter_admin.load_tensors(
            LOCAL, model=MODEL, task_id=task_id, weights=weights, config=config
        )
        report(done=True)

    async def remove(self):
        if known := sorted(self.state()):
            name = self.random.choice(known)
            self.expect(name, None)
            await self.service.adapter_admin.unload(LOCAL, ref(name))
            report(done=True)

    async def roll(self):
        if known := sorted(self.state()):
            name = self.random.choice(known)
            target = self.random.choice(self.store.history(ref(name)))
            self.expect(name, target.digest, target.task_id)
            await self.service.adapter_admin.rollback(LOCAL, ref(name), target.number)
            report(done=True)


def ref(name):
    return AdapterRef(MODEL, DEFAULT_TENANT, ByName(name))


def main(folder):
    service = build(folder / "elsewhere")
    variants = Variants(folder, service._models[MODEL].shapes)
    service._models[MODEL].store.close()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(Worker(folder / "state", variants, int(line)).run())
        report(pid=pid)
        report(status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
