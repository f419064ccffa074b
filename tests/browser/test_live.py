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

from browser.conftest import sent_meanwhile, settle
from loraplex.testing.running_server import serving
from support.cpu_seconds import cpu_seconds
from support.engine_kills import engine_pid

pytestmark = pytest.mark.xdist_group("live")

REQUEST = {"prompt": ["The capital of France is "] * 2, "max_tokens": 12, "ignore_eos": True}
MODELS = ("capitals", "chinese", "japanese")
ENGINE = "await import('/console/screens/live/engine.js');"
FOLLOW = f"const {{ Follower }} = {ENGINE}"
HISTORY = f"const {{ percentile, shareOf, countsOf, gapsOf }} = {ENGINE}"
STEPS = "const { segments, joint } = await import('/console/screens/live.js');"


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
    page.locator("canvas.steps").wait_for()
    page.get_by_text("japanese").first.wait_for()
    page.get_by_role("button", name="Pause").click()
    settle(page)
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
    page = visits.open("live", has_clock=True)
    strip = page.locator("canvas.steps")
    steps = records(server)
    newest = re.compile(f"Step {steps[-1]['step_id']:,}: ")
    expect(strip).to_have_attribute("aria-valuetext", newest)
    strip.press("ArrowLeft")
    page.get_by_role("heading", name=f"Step {steps[-2]['step_id']:,}", exact=True).wait_for()
    strip.press("End")
    page.get_by_role("heading", name=f"Step {steps[-1]['step_id']:,}", exact=True).wait_for()
    assert f"Step {steps[-1]['step_id']:,}: " in strip.get_attribute("aria-valuetext")
    expect(page.locator(".fields > div > dt")).to_have_text(list(steps[-1]))
    box = strip.bounding_box()
    strip.click(position={"x": box["width"] - 20, "y": 100})
    page.get_by_role("heading", name=f"Step {steps[-3]['step_id']:,}", exact=True).wait_for()
    # A picked step stays: nothing is polled until the screen goes on.
    assert not [url for url in sent_meanwhile(page, 12) if "/v1/iterations" in url]
    with page.expect_request("**/v1/iterations*"):
        page.get_by_role("button", name="Resume").click()
    expect(page.locator(".fields")).to_have_count(0)
    page.get_by_text("Newest steps as a table").click()
    rows = page.locator(".steps-table tbody tr")
    for index, name in enumerate(("step_id", "num_rows", "num_prefill_rows")):
        expect(rows.first.locator("td").nth(index)).to_have_text(f"{steps[-1][name]:,}")


def test_a_hidden_page_polls_nothing(visits):
    page = visits.open("live", has_clock=True)
    page.get_by_role("button", name="Pause").wait_for()
    settle(page)
    hide = (
        "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true"
        " }); document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.evaluate(hide, True)
    # What was in flight may end.
    sent_meanwhile(page, 1)
    assert sent_meanwhile(page, 12) == []
    with page.expect_request("**/v1/iterations*"):
        page.evaluate(hide, False)


def test_preemptions_and_rows_of_two_adapters_are_drawn(visits, server):
    work(server)
    page = visits.open("playground")
    step = {**records(server)[-1], "num_rows": 3, "num_base_rows": 1, "num_preempted": 2}
    step |= {"adapter_rows": {"a" * 64: 2, "b" * 64: 2}, "prefill_rows": {}, "draft_rows": {}}
    page.route("**/v1/iterations*limit=300", lambda route: route.fulfill(json=[step]))
    page.get_by_role("link", name="Live").click()
    page.locator("canvas.steps").wait_for()
    page.get_by_role("button", name="Pause").click()
    settle(page)
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
    # Four uses in three rows: the column is as high as three rows, of six that a step can have.
    assert abs(height - 160 * 3 / 6) <= 1


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
    expect(page.get_by_text("too many requests")).to_have_count(0)
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
    expect(page.locator(".queue li")).to_have_text(
        [re.compile(r"\b7$"), re.compile("base model, others.*2$", re.DOTALL)]
    )


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
    page.route("**/v1/history?*other*", lambda route: route.fulfill(json=history([])))
    page.get_by_role("link", name="Live").click()
    page.get_by_label("Base model").select_option("<b>other")
    page.get_by_text("has computed no step yet").wait_for()
    page.wait_for_url("**%3Cb%3Eother**")
    assert any("model=%3Cb%3Eother" in url for url in polled)


def history(points: list[dict], last_request: float | None = None) -> dict:
    """A response of GET /v1/history."""
    capacity = {"kv_blocks": 8192, "adapter_pages": 1016, "max_num_seqs": 64}
    found = {"step_seconds": 2, "last_request": last_request, "capacity": capacity}
    kinds = ("time_to_first_token", "inter_token_latency", "e2e_latency")
    found["latency_bounds"] = {kind: [0.01, 0.1, 1] for kind in kinds}
    return {**found, "points": points}


def point(at: float, **fields) -> dict:
    """A point of a history, of an engine that did nothing."""
    zeros = ("running", "waiting", "prompt_tokens", "output_tokens", "kv_held", "kv_cached")
    counts = {"ttft": [], "itl": [], "e2e": []}
    idle = dict.fromkeys((*zeros, "pages_used", "restarts"), 0) | {"lora_share": None}
    return {"t": at, **idle, **counts, **fields}


def open_with(visits, points, last_request=None, path="live"):
    page = visits.open("requests")
    page.route("**/v1/history*", lambda route: route.fulfill(json=history(points, last_request)))
    page.goto(page.url.replace("requests", path))
    page.get_by_role("heading", name="Is KV memory the limit?").wait_for()
    return page


def test_the_minutes_before_are_shown_at_once(visits, server):
    work(server)
    deadline = time.monotonic() + 60
    while True:
        found = json.loads(server.get("/v1/history?seconds=300")[1])
        if any(one["e2e"] for one in found["points"]):
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    page = visits.open("live")
    capacity = found["capacity"]
    fit = page.locator("section", has=page.get_by_role("heading", name="Do the adapters fit?"))
    fit.locator(".chart").wait_for()
    expect(fit.locator(".chart-axis span")).to_have_text([f"{capacity['adapter_pages']:,}", "0"])
    memory = json.loads(server.get("/v1/memory")[1])["capitals"]
    assert capacity["adapter_pages"] == memory["device"]["pages"]
    expect(page.locator(".steps-plot .chart-axis span").first).to_have_text("6")
    for axis in page.locator(".chart-axis").all():
        expect(axis.locator("span")).to_have_text([re.compile("^[1-9]"), "0"])
    # The requests from before the page was opened.
    wait = page.locator("section", has=page.get_by_role("heading", name="How long do users wait?"))
    expect(wait.get_by_role("row").nth(1)).to_contain_text("ms")


def test_a_window_without_requests_names_the_last_one(visits):
    now = time.time()
    page = open_with(visits, [point(now - 2), point(now)], last_request=now - 400)
    page.get_by_text(
        re.compile(r"No request in these 5 minutes; the last ended.*\d:\d\d:\d\d")
    ).wait_for()
    page.get_by_text("/v1/completions").first.wait_for()
    page.get_by_role("button", name="15 min").click()
    page.get_by_text("No request in these 15 minutes").wait_for()
    page.wait_for_url("**minutes=15**")


def test_a_moment_is_read_in_every_chart(visits):
    now = time.time() // 2 * 2
    points = [
        point(now - 2 * i, kv_held=100 * i, pages_used=i, output_tokens=20 * i, running=i)
        for i in reversed(range(10))
    ]
    page = open_with(visits, points)
    plot = page.get_by_role("slider", name="Is KV memory the limit?")
    page.get_by_role("button", name="Pause").click()
    plot.press("ArrowLeft")
    plot.press("ArrowLeft")
    # The newest is 0, the one before it 1.
    for text in ("100 held", "1 of 1,016 pages", "10 out", "1 of 64 running"):
        page.get_by_text(text).first.wait_for()
    expect(page.locator(".chart-at")).to_have_count(3)
    expect(plot).to_have_attribute("aria-valuetext", re.compile("100 held"))
    plot.press("Escape")
    expect(page.locator(".chart-at")).to_have_count(0)


def test_a_restart_is_hatched_and_named(visits):
    now = time.time() // 2 * 2
    points = [point(now - 60), point(now - 58), point(now - 30, restarts=1), point(now)]
    page = open_with(visits, points)
    gaps = page.get_by_role("slider", name="How fast?").locator(".chart-gap")
    expect(gaps).to_have_count(2)
    titles = gaps.evaluate_all("all => all.map((gap) => gap.title)")
    assert titles == ["The engine was restarted", "Nothing is known of this time"]


def test_numbers_of_the_tiles(visits):
    page = visits.open("live")
    found = page.evaluate(
        "async () => {"
        + HISTORY
        + STEPS
        + """
          const step = (id) => ({ step_id: id });
          const share = (lora_share) => ({ lora_share });
          return [
            percentile([0, 4, 0, 0], [0.1, 0.2, 0.4], 0.5),
            percentile([1, 0, 0, 3], [0.1, 0.2, 0.4], 0.99),
            percentile([0, 0, 0, 0], [0.1, 0.2, 0.4], 0.5),
            countsOf([{ ttft: [1, 2] }, { ttft: [0, 3] }], "ttft"),
            shareOf([share(0.1), share(0.3), share(null)]),
            shareOf([share(null)]),
            [joint(undefined, step(1)), joint(step(1), step(2)), joint(step(1), step(3)),
              joint(step(9), step(1))],
          ]; }"""
    )
    assert found[0]["ms"] == pytest.approx(150)
    assert found[1] == {"ms": 400, "isMore": True}
    assert found[2:4] == [None, [1, 5]]
    assert found[4:] == [0.2, None, ["", "", "gap", "restart"]]


def test_a_screen_that_stays_open_takes_no_more_memory(visits, server):
    """400 polls with new steps, as fast as the page can draw them."""
    work(server)
    page = visits.open("live", viewport={"width": 390, "height": 844})
    page.locator("canvas.steps").wait_for()
    page.evaluate(
        """async () => {
          const steps = await (await fetch("/v1/iterations?limit=20")).json();
          const stats = await (await fetch("/v1/internal/stats")).text();
          const history = await (await fetch("/v1/history?seconds=300")).text();
          let startNs = steps.at(-1).start_ns, id = steps.at(-1).step_id;
          const later = setTimeout;
          window.numPolls = 0;
          window.setTimeout = (run, ms) => later(run, ms === 500 || ms === 2000 ? 1 : ms);
          window.fetch = async (url) => {
            if (url.includes("/v1/iterations")) {
              window.numPolls += 1;
              const next = () => ({ start_ns: startNs += 1e6, step_id: ++id });
              const data = steps.map((one) => ({ ...one, ...next() }));
              return new Response(JSON.stringify({ now_ns: startNs, unix_ns: 1.7e18, data }));
            }
            if (url.includes("/v1/internal/stats")) return new Response(stats);
            if (url.includes("/v1/history")) return new Response(history);
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
    before = heap_after(200)
    after = heap_after(600)
    print(f"heap: {before} bytes after 200 polls, {after} after 600")
    assert after - before < 800_000


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
