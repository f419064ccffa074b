"""Workloads, figures and tables of the core benchmark, and data sets."""

import csv
import json

import pytest

from loraplex.compat.client.benchmark import (
    TimedRequest,
    delays,
    figure_table,
    figures_of,
    token_requests,
    write_csv,
    write_perfetto,
)
from loraplex.compat.client.programs import BENCHMARK_FLAGS
from loraplex.compat.client.request_parts import NO_OUTPUT_TOKENS, read_dataset
from loraplex.compat.flags import read_flags
from loraplex.core.errors import ConfigError
from loraplex.demo import BASE_PATH
from support.naming import naming
from support.program_options import program_options

NORMAL = {"input_mean": 20, "input_stdev": 4, "output_mean": 6, "output_stdev": 0}


def options(workload="token-norm-dist", **given):
    return program_options(BENCHMARK_FLAGS, workload=workload, **given)


def test_the_table_of_the_founding_example():
    figures = {
        "Requests/Sec": 188.09,
        "OP tokens/sec": 3857.66,
        "Avg. IP tokens per request": 128.53,
        "Total latency (ms)": 26582.72,
    }
    assert figure_table(figures) == [
        "+----------------------------+----------+",
        "|            Stat            |  Value   |",
        "+----------------------------+----------+",
        "|        Requests/Sec        |  188.09  |",
        "|       OP tokens/sec        | 3857.66  |",
        "| Avg. IP tokens per request |  128.53  |",
        "|     Total latency (ms)     | 26582.72 |",
        "+----------------------------+----------+",
    ]


def timed(*latencies_ms, start=100.0):
    return [
        TimedRequest(start + i, start + i + ms / 1000, num_input_tokens=10, num_output_tokens=4)
        for i, ms in enumerate(latencies_ms)
    ]


def test_figures():
    figures = figures_of(timed(*([100.0] * 10), 1000.0))
    assert figures["Total latency (ms)"] == pytest.approx(11_000)
    assert figures["Requests/Sec"] == pytest.approx(1)
    assert figures["OP tokens/sec"] == pytest.approx(4)
    assert figures["Avg. latency (ms)"] == pytest.approx(2000 / 11)
    assert figures["P99 latency (ms)"] == pytest.approx(1000)
    assert figures["P90 latency (ms)"] == pytest.approx(100)
    assert figures["Avg. InFlight requests"] == pytest.approx(2 / 11)
    assert [line.split("|")[1].strip() for line in figure_table(figures)[3:-1]] == [
        "Requests/Sec",
        "OP tokens/sec",
        "Avg. latency (ms)",
        "P99 latency (ms)",
        "P90 latency (ms)",
        "Avg. IP tokens per request",
        "Avg. OP tokens per request",
        "Total latency (ms)",
        "Total requests",
    ]


def test_figures_as_files(tmp_path):
    requests = timed(100.0, 50.0)
    write_csv(figures_of(requests), str(tmp_path / "stats.csv"))
    header, row = csv.reader((tmp_path / "stats.csv").read_text().splitlines())
    assert header[0] == "Requests/Sec"
    assert header[-1] == "Total requests"
    assert row[-1] == "2.00"
    write_perfetto(requests, tmp_path / "trace.json")
    first, second = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (first["name"], first["ph"], first["ts"]) == ("req_0", "X", 0.0)
    assert first["dur"] == pytest.approx(100_000)
    assert second["args"] == {"isl": 10, "osl": 4}


@pytest.mark.parametrize("workload", ["token-norm-dist", "token_norm_dist"])
def test_normal_lengths(workload):
    requests = token_requests(options(workload, num_requests=200, **NORMAL), print)
    lengths = [len(request.token_ids) for request in requests]
    assert len(requests) == 200
    assert 18 < sum(lengths) / 200 < 23
    assert min(lengths) >= 1
    assert len(set(lengths)) > 5
    assert {request.num_output_tokens for request in requests} == {6}
    assert all(0 < i < 1000 for request in requests for i in request.token_ids)


def test_the_same_seed_gives_the_same_requests():
    one, two, other = (
        token_requests(options(num_requests=5, seed=seed, **NORMAL), print) for seed in (1, 1, 2)
    )
    assert one == two != other


def test_histogram_lengths_and_the_longest_prompt():
    given = options("token-from-histogram", histogram_key="example", num_requests=100)
    longest = max(len(r.token_ids) for r in token_requests(given, print))
    shorter = options(
        "token-from-histogram", histogram_key="example", num_requests=100, max_input_len=64
    )
    assert longest > 64
    assert max(len(r.token_ids) for r in token_requests(shorter, print)) == 64


def test_a_data_set_as_tokens(tmp_path):
    path = dataset(tmp_path, {"input": "What is", "instruction": "this", "output": "a b c d"})
    lines = []
    (request,) = token_requests(
        options("dataset", dataset=path, tokenizer_dir=str(BASE_PATH)), lines.append
    )
    assert (request.token_ids[0], request.num_output_tokens) == (1, 5)
    assert (request.prompt.end_id, request.prompt.pad_id) == (2, 0)
    assert lines[-1].startswith("Tokenizer: Tokens per word = ")


@pytest.mark.parametrize(
    ("workload", "given", "named"),
    [
        ("tokens", {}, ("tokens",)),
        ("token-norm-dist", NORMAL | {"output_stdev": None}, ("--output-stdev",)),
        ("token-norm-dist", NORMAL | {"input_stdev": -1}, ("--input-stdev", 0, -1)),
        ("token-from-histogram", {"histogram_key": "mine"}, ("--histogram-key", "mine")),
        ("dataset", {}, ("--dataset",)),
        ("token-norm-dist", NORMAL | {"num_requests": 0}, ("--num-requests", 1, 0)),
    ],
)
def test_wrong_workloads(workload, given, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        token_requests(options(workload, **given), print)


@pytest.mark.parametrize(
    ("line", "workload"),
    [
        ("-i grpc --max-input-len 300 dataset --dataset d --tokenizer-dir t", "dataset"),
        ("token-norm-dist --input-mean 1 -i grpc", "token-norm-dist"),
        # identity_test.py of 0.5.0 had this one workload.
        ("-i grpc --max_input_len 50 --dataset d --tokenizer_dir t --time_bet_reqs 0 1", "dataset"),
    ],
)
def test_the_workload_may_stand_anywhere_or_be_left_out(line, workload):
    read = read_flags(BENCHMARK_FLAGS, line.split(), "benchmark")
    assert (read.workload, read.protocol) == (workload, "grpc")
    assert read.time_bet_reqs in ((), [0.0, 1.0])


def test_delays():
    assert delays(options(time_bet_reqs=[0.5, 1.0]), 3) == [0.5, 1.0, 0.5]
    assert delays(options(), 3) == [0.0] * 3
    assert delays(options(request_rate=10.0, time_delay_dist="constant"), 2) == [0.1, 0.1]
    drawn = delays(options(request_rate=10.0), 2000)
    assert 0.08 < sum(drawn) / 2000 < 0.12
    assert len(set(drawn)) > 1000
    with pytest.raises(ConfigError, match=naming("--request-rate", 0)):
        delays(options(request_rate=0.0), 1)
    with pytest.raises(ConfigError, match=naming("constant", "exponential_dist", "poisson")):
        delays(options(time_delay_dist="poisson"), 1)


def dataset(folder, *rows):
    path = folder / "data.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


def test_data_sets_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match=naming("--dataset", tmp_path)):
        read_dataset(f"{tmp_path}/no", None, print)
    with pytest.raises(ConfigError, match=naming("JSON", "--dataset", "$[0]")):
        read_dataset(dataset(tmp_path, 1), None, print)


def test_data_sets(tmp_path):
    path = dataset(
        tmp_path,
        {"input": "one two", "instruction": "three", "output": "a b"},
        {"input": "word " * 40, "instruction": "", "output": "a"},
        {"input": "no output", "instruction": ""},
    )
    lines = []
    samples = read_dataset(path, 20, lines.append)
    assert [s.prompt for s in samples] == ["one two three", "no output "]
    assert [s.num_output_tokens for s in samples] == [2, NO_OUTPUT_TOKENS]
    assert lines == [f"[INFO] 1 prompts have no output: each gets {NO_OUTPUT_TOKENS} tokens."]
    assert len(read_dataset(path, None, lines.append)) == 3


@pytest.mark.parametrize("content", ["", "{}", '[{"instruction": "x"}]', '[{"input": 3}]', "[]"])
def test_wrong_data_sets(tmp_path, content):
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--dataset"):
        read_dataset(str(path), None, print)
