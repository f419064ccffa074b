import copy
import json

import pytest
from step import find_baseline, slower_rows

from support.naming import naming


@pytest.fixture
def report():
    rows = [{"batch": 1, "best_share_of_floor": 0.8}, {"batch": 8, "best_share_of_floor": 0.6}]
    return {
        "model": "llama-small",
        "dtype": "bfloat16",
        "quantization": "int8",
        "context": 256,
        "threads": 2,
        "limits": {"vector_bytes": 64},
        "machine": {"cpu_model": "Abacus"},
        "rows": rows,
    }


def with_share(report, index, share):
    changed = copy.deepcopy(report)
    changed["rows"][index]["best_share_of_floor"] = share
    return changed


def test_a_slower_row_is_named(report):
    slower = slower_rows(with_share(report, 1, 0.5), report, 0.15)
    assert slower == ["batch 8: 50% of the floor, 60% in the baseline"]


def test_within_the_tolerance_and_faster(report):
    assert slower_rows(with_share(report, 0, 0.69), report, 0.15) == []
    assert slower_rows(with_share(report, 0, 0.95), report, 0.15) == []


@pytest.mark.parametrize(
    ("name", "value"), [("model", "llama-tiny"), ("context", 8192), ("threads", 4)]
)
def test_another_subject_is_refused(report, name, value):
    with pytest.raises(ValueError, match=naming(name, report[name])):
        slower_rows({**report, name: value}, report, 0.15)


def test_other_vectors_are_refused(report):
    with pytest.raises(ValueError, match=naming("vector_bytes", 64, 32)):
        slower_rows({**report, "limits": {"vector_bytes": 32}}, report, 0.15)


def test_a_batch_without_a_baseline_is_refused(report):
    larger = {**report, "rows": [*report["rows"], {"batch": 32, "best_share_of_floor": 0.5}]}
    with pytest.raises(ValueError, match=naming("batch", 32, "[1, 8]")):
        slower_rows(larger, report, 0.15)


def test_a_folder_has_the_baseline_of_this_model_and_processor(report, tmp_path):
    for name, changes in {
        "step-other-model": {"model": "llama-3.1-8b:Q4_K_M"},
        "step-other-processor": {"machine": {"cpu_model": "Loom"}},
        "step-other-vectors": {"limits": {"vector_bytes": 32}},
        "step-this": {},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**report, **changes}))
    (tmp_path / "startup.json").write_text("[]")
    path, baseline = find_baseline(tmp_path, report)
    assert (path.name, baseline) == ("step-this.json", report)
    (tmp_path / "step-this.json").unlink()
    with pytest.raises(ValueError, match=naming("Abacus", "llama-small", "--json")):
        find_baseline(tmp_path, report)
