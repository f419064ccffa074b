import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.metrics_config import MetricsConfig, read_metrics_config


def test_nothing_said_is_triton_by_default():
    assert read_metrics_config(()) == MetricsConfig()
    assert not MetricsConfig().keeps_latencies


def test_the_last_word_counts():
    words = ("summary_latencies=true", "counter_latencies=FALSE", "summary_latencies=0")
    config = read_metrics_config(words)
    assert (config.summary_latencies, config.counter_latencies) == (False, False)
    assert read_metrics_config(("histogram_latencies=1",)).keeps_latencies


def test_quantiles_with_and_without_errors():
    assert read_metrics_config(("summary_quantiles=0.5:0.05,0.99",)).quantiles == (0.5, 0.99)


@pytest.mark.parametrize(
    "word",
    [
        *("summary_latencies", "summary_latencies=", "summary_latencies=maybe", "x=true", ""),
        *("summary_quantiles=", "summary_quantiles=1", "summary_quantiles=0.5:-1"),
        *("summary_quantiles=nan", "summary_quantiles=0.5:inf", "summary_quantiles=half"),
    ],
)
def test_what_cannot_be_is_named(word):
    with pytest.raises(ConfigError, match=r"summary_quantiles") as raised:
        read_metrics_config((word,))
    assert repr(word.removeprefix("summary_quantiles=")) in str(raised.value)
