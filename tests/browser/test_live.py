"""The live screen: its strip is the server's records, each once, and watching costs little."""

import concurrent.futures
import json
import os
import re
import signal
import threading
import time

import httpx
import pytest
from playwright.sync_api import expect

from loraplex.testing.running_server import serving
from support.cpu_seconds import cpu_seconds
from support.engine_kills import engine_pid

REQUEST = {"prompt": ["The capital of France is "] * 2, "max_tokens": 12, "ignore_eos": True}
MODELS = ("capitals", "chinese", "japanese")
FOLLOW = "const { Follower, percentile, shareOf } = await import('/console/lib/follow.js');"
STEPS = "const { segments, joint } = await import('/console/parts/steps.js');"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--max-num-seqs", "6", "--num-draft-tokens", "3", "--engine-wait-seconds", "170")
    with serving(tmp_path_factory.mktemp("live"), *flags) as running:
        yield running


def work(server, **fields) -> None:
    """Have requests of every model computed together."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(server.post, "/v1/completions", {"model": model, **REQUEST, **fields})
            for model in MODELS
        ]
        assert [job.result()[0] for job in jobs] == [200] * 3


def records(server) -> list[dict]:
    return json.loads(server.get("/v1/iterations?limit=1000")[1])


def expected_segments(step: dict) -> list[tuple[str, str, int]]:
    found = []
    for digest, rows in [("", step["num_base_rows"]), *step["adapter_rows"].items()]:
        prefill = step["prefill_rows"].get(digest, 0)
        draft = step["draft_rows"].get(digest, 0)
        found += [(digest, "prefill", prefill), (digest, "draft", draft)]
        found += [(digest, "decode", rows - prefill - draft)]
    return [one for one in found if one[2]]


def test_the_strip_is_the_records(visits, server):
    work(server)
    page = visits.open("live")
    page.get_by_role("slider").wait_for()
    page.get_by_text("japanese").first.wait_for()
    page.get_by_role("button", name="Pause").click()
    steps = records(server)
    shown = page.evaluate(
        "async (steps) => {" + STEPS + "return steps.map(s => segments(s).map("
        "p => [p.digest, p.kind, p.rows])); }",
        steps,
    )
    assert [[tuple(part) for part in parts] for parts in shown] == [
        expected_segments(step) for step in steps
    ]
    assert {kind for parts in shown for _, kind, _ in parts} == {"decode", "prefill", "draft"}
    # Rows of the newest columns, counted in the pixels.
    drawn = page.evaluate(
        """() => {
          const canvas = document.querySelector("canvas.steps");
          const to = canvas.getContext("2d");
          const rows = [];
          const { data, width, height } = to.getImageData(0, 0, canvas.width, canvas.height);
          for (let i = 0; i < Math.floor(width / 8); i += 1) {
            const x = width - 4 - 8 * i;
            let runs = 0, before = 0;
            for (let y = 0; y < height; y += 1) {
              const alpha = data[4 * (y * width + x) + 3];
              runs += alpha > 0 && before === 0;
              before = alpha;
            }
            rows.push(runs);
          }
          return rows;
        }"""
    )
    newest = [step["num_rows"] for step in reversed(steps)][: len(drawn)]
    assert drawn[: len(newest)] == newest
    assert not any(drawn[len(newest) :])


def test_a_step_is_picked_and_all_of_it_shown(visits, server):
    work(server)
    page = visits.open("live")
    strip = page.get_by_role("slider")
    steps = records(server)
    newest = re.compile(f"Step {steps[-1]['step_id']:,}: ")
    expect(strip).to_have_attribute("aria-valuetext", newest)
    strip.press("ArrowLeft")
    page.get_by_role("heading", name=f"Step {steps[-2]['step_id']:,}", exact=True).wait_for()
    strip.press("End")
    page.get_by_role("heading", name=f"Step {steps[-1]['step_id']:,}", exact=True).wait_for()
    assert f"Step {steps[-1]['step_id']:,}: " in strip.get_attribute("aria-valuetext")
    fields = page.locator(".fields > div > dt").all_inner_texts()
    assert fields == list(steps[-1])
    box = strip.bounding_box()
    strip.click(position={"x": box["width"] - 20, "y": 100})
    page.get_by_role("heading", name=f"Step {steps[-3]['step_id']:,}", exact=True).wait_for()
    # A picked step stays: nothing is polled until the screen goes on.
    polls = []
    page.on("request", lambda request: polls.append(request.url))
    page.wait_for_timeout(1600)
    assert not [url for url in polls if "/v1/iterations" in url]
    page.get_by_role("button", name="Resume").click()
    with page.expect_request("**/v1/iterations*"):
        pass
    expect(page.locator(".fields")).to_have_count(0)
    page.get_by_text("Newest steps as a table").click()
    rows = page.locator(".steps-table tbody tr")
    first = rows.first.locator("td").all_inner_texts()[:3]
    assert first == [f"{steps[-1][name]:,}" for name in ("step_id", "num_rows", "num_prefill_rows")]


def test_a_hidden_page_polls_nothing(visits):
    page = visits.open("live")
    page.get_by_role("button", name="Pause").wait_for()
    polls = []
    page.on("request", lambda request: polls.append(request.url))
    hide = (
        "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true"
        " }); document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.evaluate(hide, True)
    page.wait_for_timeout(1000)
    polls.clear()
    page.wait_for_timeout(2500)
    assert polls == []
    with page.expect_request("**/v1/iterations*"):
        page.evaluate(hide, False)


def test_preemptions_and_rows_of_two_adapters_are_drawn(visits, server):
    work(server)
    page = visits.open("playground")
    step = {**records(server)[-1], "num_rows": 3, "num_base_rows": 1, "num_preempted": 2}
    step |= {"adapter_rows": {"a" * 64: 2, "b" * 64: 2}, "prefill_rows": {}, "draft_rows": {}}
    page.route("**/v1/iterations*limit=300", lambda route: route.fulfill(json=[step]))
    page.get_by_role("link", name="Live").click()
    page.get_by_role("slider").wait_for()
    page.get_by_role("button", name="Pause").click()
    top, height = page.evaluate(
        """() => {
          const canvas = document.querySelector("canvas.steps");
          const { width, height } = canvas;
          const { data } = canvas.getContext("2d").getImageData(width - 4, 0, 1, height);
          let first = 20;
          while (!data[4 * first + 3]) first += 1;
          return [[...data.slice(4, 7)], height - first];
        }"""
    )
    assert top == [0xB3, 0x26, 0x1E]
    # Four uses in three rows: the column is as high as three rows, of 20 px each.
    assert abs(height - 60) <= 1


def test_it_waits_as_long_as_the_server_says(visits):
    page = visits.open("playground")
    visits.expect_status(429)
    times = []

    def refuse(route):
        times.append(time.monotonic())
        error = {"error": {"message": "too many requests", "code": "rate_limited"}}
        route.fulfill(status=429, json=error, headers={"retry-after": "2"})

    page.route("**/v1/iterations*", refuse)
    page.get_by_role("link", name="Live").click()
    page.get_by_text("too many requests").wait_for()
    while len(times) < 2:
        page.wait_for_timeout(50)
    page.unroute("**/v1/iterations*")
    page.get_by_text("too many requests").wait_for(state="detached")
    assert times[1] - times[0] > 1.9


def test_rows_that_wait_are_counted_by_adapter(visits, server):
    work(server)
    digest = next(iter(records(server)[-1]["adapter_rows"] or {"f" * 64: 1}))
    page = visits.open("playground")

    def with_queue(route):
        body = json.loads(route.fetch().text())
        body["models"]["capitals"]["waiting"] = {digest: 7}
        body["models"]["capitals"]["engine"]["num_waiting"] = 9
        route.fulfill(json=body)

    page.route("**/v1/internal/stats*", with_queue)
    page.get_by_role("link", name="Live").click()
    page.locator(".queue li").first.wait_for()
    rows = page.locator(".queue li").all_inner_texts()
    assert [row.split()[-1] for row in rows] == ["7", "2"]
    assert digest[:4] in rows[0]
    assert "base model, others" in rows[1]


def test_of_several_models_one_is_chosen(visits):
    page = visits.open("playground")
    polled = []

    def two_models(route):
        polled.append(route.request.url)
        body = json.loads(route.fetch(url=route.request.url.split("?")[0]).text())
        body["models"]["<b>other"] = body["models"]["capitals"]
        route.fulfill(json=body)

    page.route("**/v1/internal/stats*", two_models)
    page.route("**/v1/iterations?*other*", lambda route: route.fulfill(json=[]))
    page.get_by_role("link", name="Live").click()
    page.get_by_label("Base model").select_option("<b>other")
    page.get_by_text("has computed no step yet").wait_for()
    assert "%3Cb%3Eother" in page.url
    assert any("model=%3Cb%3Eother" in url for url in polled)


def test_numbers_of_the_tiles(visits):
    page = visits.open("live")
    found = page.evaluate(
        "async () => {"
        + FOLLOW
        + STEPS
        + """
          const step = (id, lora) => ({ step_id: id, duration_ns: 100, timing: { lora_ns: lora } });
          return [
            percentile([0, 4, 0, 0], [0.1, 0.2, 0.4], 0.5),
            percentile([1, 0, 0, 3], [0.1, 0.2, 0.4], 0.99),
            percentile([0, 0, 0, 0], [0.1, 0.2, 0.4], 0.5),
            shareOf([step(1, 10), step(2, 30), step(3, null)]),
            shareOf([step(1, null)]),
            [joint(undefined, step(1)), joint(step(1), step(2)), joint(step(1), step(3)),
              joint(step(9), step(1))],
          ]; }"""
    )
    assert found[0]["ms"] == pytest.approx(150)
    assert found[1] == {"ms": 400, "isMore": True}
    assert found[2] is None
    assert found[3:] == [0.2, None, ["", "", "gap", "restart"]]


def test_a_screen_that_stays_open_takes_no_more_memory(visits, server):
    """1,000 polls with new steps, as fast as the page can draw them."""
    work(server)
    page = visits.open("live", viewport={"width": 390, "height": 844})
    page.get_by_role("slider").wait_for()
    page.evaluate(
        """async () => {
          const steps = await (await fetch("/v1/iterations?limit=20")).json();
          const stats = await (await fetch("/v1/internal/stats")).text();
          let startNs = steps.at(-1).start_ns, id = steps.at(-1).step_id;
          const later = setTimeout;
          window.numPolls = 0;
          window.setTimeout = (run, ms) => later(run, ms === 500 ? 1 : ms);
          window.fetch = async (url) => {
            if (url.includes("/v1/iterations")) {
              window.numPolls += 1;
              const next = () => ({ start_ns: startNs += 1e6, step_id: ++id });
              const data = steps.map((one) => ({ ...one, ...next() }));
              return new Response(JSON.stringify({ now_ns: startNs, unix_ns: 1.7e18, data }));
            }
            if (url.includes("/v1/internal/stats")) return new Response(stats);
            return new Response('{"data":[]}');
          };
        }"""
    )
    cdp = page.context.new_cdp_session(page)

    def heap_after(num_polls: int) -> int:
        page.evaluate(
            "most => new Promise(resolve => { const timer = setInterval(() => "
            "window.numPolls >= most && resolve(clearInterval(timer)), 50); })",
            num_polls,
        )
        sizes = []
        for _ in range(5):  # what a frame in progress holds is no garbage until it ends
            cdp.send("HeapProfiler.collectGarbage")
            sizes.append(cdp.send("Runtime.getHeapUsage")["usedSize"])
            page.evaluate("new Promise(requestAnimationFrame)")
        return min(sizes)

    # By then everything that is kept for a while is full.
    before = heap_after(650)
    after = heap_after(1650)
    print(f"heap: {before} bytes after 650 polls, {after} after 1,650")
    assert after - before < 2_000_000


def test_no_step_is_lost_or_doubled_when_the_engine_restarts(visits, server):
    page = visits.open("live")
    visits.expect_status(503)  # the server's health meanwhile
    page.evaluate(
        "async () => {"
        + FOLLOW
        + """
          const follower = (window.follower = new Follower("capitals"));
          window.isDone = false;
          window.following = (async () => {
            while (!window.isDone) {
              await follower.poll();
              await new Promise((run) => setTimeout(run, 20));
            }
            await follower.poll();
            return follower.steps.map((step) => [step.step_id, step.start_ns]);
          })();
        }"""
    )
    work(server)
    long = threading.Thread(target=work, args=(server,), kwargs={"max_tokens": 60})
    long.start()
    time.sleep(0.2)
    first = engine_pid(server)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    server.wait_until(ready=False)
    server.wait_until(ready=True)
    long.join()
    work(server)
    assert engine_pid(server) != first
    page.evaluate("() => { window.isDone = true; }")
    followed = page.evaluate("window.following")
    kept = [[step["step_id"], step["start_ns"]] for step in records(server)]
    assert followed[-len(kept) :] == kept[-len(followed) :]
    assert len({start_ns for _, start_ns in followed}) == len(followed)
    assert [step_id for step_id, _ in followed].count(1) >= 1, "the ids began anew"
    page.get_by_text("engine restarted, or steps missing").wait_for()


def test_fifty_viewers_leave_the_server_quick(server):
    work(server)
    is_over = threading.Event()
    polled = []

    def view() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            last = 0
            while not is_over.is_set():
                body = client.get(f"/v1/iterations?after_ns={last}&limit=1000").json()
                last = max([last, *(step["start_ns"] for step in body["data"])])
                polled.append(client.get("/v1/internal/stats").status_code)
                is_over.wait(0.5)

    before = cpu_seconds(server.process.pid)
    viewers = [threading.Thread(target=view) for _ in range(50)]
    for viewer in viewers:
        viewer.start()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while len(polled) < 400:
            assert client.get("/ping").status_code == 200
            time.sleep(0.05)
    is_over.set()
    for viewer in viewers:
        viewer.join()
    assert set(polled) == {200}
    # Processor time, for the viewers' own threads compete for the cores.
    used = cpu_seconds(server.process.pid) - before
    print(f"{1000 * used / len(polled):.1f} ms of the server's time for two polls of a viewer")
    assert used / len(polled) < 0.05
