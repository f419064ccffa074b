"""Diagrams of docs/explanation."""

from tools.drawing import Drawing

_SCHEDULE = {
    "request 1, adapter A": ("blue", ["p 6", "1", "1", "1", "1", "1", "1", ""]),
    "request 2, base model": ("plain", ["p 4", "1", "1", "1", "", "", "", ""]),
    "request 3, adapter B": ("green", ["", "p 8", "p 7", "p 3", "1", "1", "1", "1"]),
    "request 4, adapter A": ("blue", ["", "", "p 2", "1", "1+3", "1+3", "1", ""]),
    "request 5, A and C": ("amber", ["", "", "", "", "p 5", "1", "1", "1"]),
}
"""Requests with their colour and what each of eight steps computes of them: `p N` are N tokens of
the prompt, `1` is an output token, `1+3` one with three draft tokens."""

_ROWS = (
    ("tenant 1: legal", "amber", 8, "part of a prompt"),
    ("tenant 2: base model", "plain", 1, "next token"),
    ("tenant 2: support", "blue", 1, "next token"),
    ("tenant 3: legal", "amber", 1, "next token"),
    ("tenant 3: sql", "green", 4, "next token and three draft tokens"),
    ("tenant 4: support", "blue", 1, "next token"),
)
"""Rows of one step: owner and adapter, their colour, how many tokens, and which."""


def architecture() -> str:
    drawing = Drawing(
        "Processes of loraplex",
        "Clients send requests to the serving process. It sends them to one engine process for "
        "each base model. Staging workers read adapter files, sandbox workers check grammars and "
        "chat templates. The state directory keeps canonical adapter files and names.",
        760,
        430,
    )
    drawing.box((20, 20), (200, 46), ["OpenAI, LoRAX, llgtrt", "HTTP"], kind="blue")
    drawing.box((240, 20), (200, 46), ["Triton, KServe", "HTTP and gRPC"], kind="blue")
    drawing.arrow((120, 66), (120, 104), both=True)
    drawing.arrow((340, 66), (340, 104), both=True)
    drawing.box((20, 104), (420, 190), kind="plain")
    drawing.text((32, 126), "Serving process", kind="title")
    drawing.box((36, 140), (388, 34), ["Front ends: parse requests, write responses"])
    drawing.box((36, 184), (388, 46), ["Service", "keys, tenants, adapter names, tokenizer"])
    drawing.box((36, 240), (388, 46), ["Engine link", "keeps requests until they end"])
    drawing.box((520, 104), (220, 250), kind="plain")
    drawing.text((532, 126), "Engine process per model", kind="title")
    drawing.box((536, 140), (188, 46), ["Scheduler", "plans each step"], kind="amber")
    drawing.box((536, 218), (188, 46), ["Model runner", "computes the batch"], kind="green")
    drawing.box((536, 296), (188, 46), ["Memory", "weights, KV, adapters"], kind="green")
    drawing.arrow((590, 186), (590, 218))
    drawing.arrow((670, 218), (670, 186))
    drawing.text((584, 207), "plan", anchor="end")
    drawing.text((678, 207), "result")
    drawing.arrow((630, 264), (630, 296), both=True)
    drawing.arrow((440, 263), (480, 263), (480, 163), (536, 163), both=True)
    drawing.text((444, 255), "ZeroMQ")
    drawing.box((20, 340), (200, 46), ["Staging workers", "read users' files"], kind="rose")
    drawing.box((240, 340), (200, 46), ["Sandbox workers", "grammars, templates"], kind="rose")
    drawing.arrow((120, 294), (120, 340), both=True)
    drawing.arrow((340, 294), (340, 340), both=True)
    drawing.box((520, 374), (220, 36), ["State: adapter files"], kind="blue")
    drawing.arrow((120, 386), (120, 402), (520, 402))
    drawing.arrow((740, 392), (750, 392), (750, 319), (724, 319))
    return drawing.svg()


def mixed_batch() -> str:
    drawing = Drawing(
        "One batch with the requests of four tenants",
        "Six requests with three adapters and the base model are computed in one step: the base "
        "model's weights once for all rows, and each row's own adapter at its own rank.",
        760,
        266,
    )
    drawing.text((20, 24), "request")
    drawing.text((180, 24), "tokens of one step")
    drawing.text((560, 24), "one batch")
    for row, (name, kind, tokens, about) in enumerate(_ROWS):
        y = 36 + 36 * row
        drawing.text((20, y + 18), name, kind="")
        for token in range(tokens):
            drawing.box((180 + 28 * token, y), (24, 26), kind=kind)
        drawing.text((190 + 28 * tokens, y + 18), about)
    drawing.box((560, 50), (180, 60), ["Base model's weights", "once for all rows"])
    drawing.arrow((650, 110), (650, 134))
    drawing.box((560, 134), (180, 60), ["Adapters' A and B", "each row its own"])
    for number, kind in enumerate(("blue", "green", "amber")):
        drawing.box((608 + 28 * number, 202), (24, 26), kind=kind)
    return drawing.svg()


def adapter_memory() -> str:
    drawing = Drawing(
        "Tiers of adapter memory",
        "Canonical files on disk are read into the host tier, and copied from there to pages of "
        "the device tier. An adapter takes pages in proportion to its rank and its modules.",
        760,
        360,
    )
    adapters = (("A, rank 8", "blue"), ("B, rank 8", "green"), ("C, rank 16", "amber"))
    drawing.text((20, 28), "Disk: every adapter", kind="title")
    drawing.text((20, 46), "one canonical file each")
    drawing.text((270, 28), "Host tier", kind="title")
    drawing.text((270, 46), "lora_host_bytes")
    drawing.text((520, 28), "Device tier", kind="title")
    drawing.text((520, 46), "lora_device_bytes, in equal pages")
    names = [*adapters, ("D, rank 8, q and v", "rose"), ("E, rank 64", "plain")]
    for number, (name, kind) in enumerate(names):
        drawing.box((20, 62 + 44 * number), (160, 34), [name], kind=kind)
    drawing.text((100, 298), "... thousands more", anchor="middle")
    for number, (name, kind) in enumerate([*adapters, names[3]]):
        drawing.box((270, 62 + 44 * number), (160, 34), [name], kind=kind)
        drawing.arrow((180, 79 + 44 * number), (270, 79 + 44 * number))
    drawing.text((225, 72), "read", anchor="middle")
    pages = [*["blue"] * 4, *["green"] * 4, *["amber"] * 8, "rose", *["page"] * 7]
    for number, kind in enumerate(pages):
        x, y = 520 + 36 * (number % 6), 62 + 44 * (number // 6)
        letter = {"blue": "A", "green": "B", "amber": "C", "rose": "D"}.get(kind)
        drawing.box((x, y), (32, 34), [letter] if letter else [], kind=kind if letter else "plain")
    for number in range(4):
        drawing.arrow((430, 79 + 44 * number), (516, 79 + 44 * number))
    drawing.text((473, 72), "copy", anchor="middle")
    drawing.text((520, 262), "Twice the rank: twice the pages.")
    drawing.text((520, 280), "Fewer modules: fewer pages.")
    drawing.arrow((632, 296), (632, 326), (350, 326), (350, 240), dashed=True)
    drawing.text((490, 318), "eviction", anchor="middle")
    drawing.text((490, 346), "An evicted adapter returns when a request needs it.", anchor="middle")
    return drawing.svg()


def batching() -> str:
    drawing = Drawing(
        "Eight steps of in-flight batching",
        "Requests for several adapters and for the base model share every step. They join and "
        "leave at any step; long prompts are computed in chunks between the output tokens of "
        "others.",
        760,
        300,
    )
    for step in range(8):
        drawing.text((226 + 66 * step, 28), f"step {step + 1}", anchor="middle")
    for row, (name, (kind, cells)) in enumerate(_SCHEDULE.items()):
        y = 42 + 40 * row
        drawing.text((20, y + 21), name, kind="label")
        for step, cell in enumerate(cells):
            if cell:
                drawing.box((196 + 66 * step, y), (60, 32), [cell], kind=kind)
    drawing.text((20, 262), "p N: N tokens of the prompt (prefill); 1: one output token (decode)")
    drawing.text(
        (20, 282), "1+3: one output token and three draft tokens. Each column is one batch."
    )
    return drawing.svg()


def determinism() -> str:
    drawing = Drawing(
        "What an output depends on",
        "Model, adapter digest, prompt, parameters and seed determine the logits and the drawn "
        "tokens. Batch, chunks, preemption, evictions, draft tokens, threads and crashes do not.",
        760,
        330,
    )
    inputs = ["model and data types", "adapter's digest and scale", "prompt", "parameters, seed"]
    drawing.text((20, 28), "Determines the output", kind="title")
    for number, name in enumerate(inputs):
        drawing.box((20, 42 + 44 * number), (220, 34), [name], kind="blue")
        drawing.arrow((240, 59 + 44 * number), (270, 59 + 44 * number))
    drawing.box(
        (270, 42), (210, 122), ["Logits", "each row's sums in", "one fixed order"], kind="green"
    )
    drawing.box((270, 174), (210, 44), ["Draw", "by seed and position"], kind="green")
    drawing.arrow((375, 164), (375, 174))
    drawing.arrow((480, 196), (540, 196))
    drawing.box((540, 175), (200, 42), ["output token"], kind="amber")
    drawing.text((20, 248), "Changes only the time", kind="title")
    others = [
        ("other requests", "chunks of prompts", "prefix hits", "preemption"),
        ("evictions", "draft tokens", "number of threads", "crashes"),
    ]
    for row, names in enumerate(others):
        for column, name in enumerate(names):
            place = 20 + 182 * column, 260 + 34 * row
            drawing.box(place, (174, 28), [name], kind="plain")
    return drawing.svg()
