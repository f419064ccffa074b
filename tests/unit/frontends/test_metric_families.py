"""Families of other systems, as those systems write them."""

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from loraplex.frontends.metric_families import as_originals_write


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('nv_a{model="m",version="1"} 176.0', 'nv_a{model="m",version="1"} 176'),
        ('nv_a{model="m"} 0.25', 'nv_a{model="m"} 0.25'),
        ('nv_a{model="m"} 1.732323232123456e+15', 'nv_a{model="m"} 1732323232123456'),
        ('nv_a{model="m"} NaN', 'nv_a{model="m"} Nan'),
        (
            'nv_h_bucket{le="10.0",model="m",version="1"} 3.0',
            'nv_h_bucket{model="m",version="1",le="10"} 3',
        ),
        ('vllm:h_bucket{a="b",le="+Inf",z="y"} 3.0', 'vllm:h_bucket{a="b",z="y",le="+Inf"} 3'),
        ('vllm:h_bucket{le="0.001",z="y"} 3.0', 'vllm:h_bucket{z="y",le="0.001"} 3'),
        ('nv_s{model="m",quantile="0.5"} 7.5', 'nv_s{model="m",quantile="0.5"} 7.5'),
        ('nv_s{model="m",quantile="0.5",version="1"} NaN', None),
        ('loraplex_h_bucket{le="1.0",model="m"} 3.0', 'loraplex_h_bucket{le="1.0",model="m"} 3.0'),
        ("# TYPE nv_a untyped", "# TYPE nv_a counter"),
    ],
)
def test_numbers_and_labels(line, expected):
    expected = expected or 'nv_s{model="m",version="1",quantile="0.5"} Nan'
    written = as_originals_write(f"{line}\nother 1.0\n".encode()).decode()
    assert written == f"{expected}\nother 1.0\n"


def test_values_of_labels_stay():
    registry = CollectorRegistry()
    odd = 'a,le="1.0",b} 5.0\\ "x'
    Gauge("nv_odd", "help", ["model"], registry=registry).labels(odd).set(2)
    Histogram("vllm:h", "help", ["model"], buckets=(1,), registry=registry).labels(odd).observe(2)
    before = generate_latest(registry).decode()
    after = as_originals_write(before.encode()).decode()
    (gauge,) = [line for line in before.splitlines() if line.startswith("nv_odd{")]
    escaped = gauge.removeprefix("nv_odd{").removesuffix("} 2.0")
    lines = after.splitlines()
    assert f"nv_odd{{{escaped}}} 2" in lines
    assert f'vllm:h_bucket{{{escaped},le="+Inf"}} 1' in lines
