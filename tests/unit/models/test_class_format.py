"""What config.json states of labels, and architectures with a classification head."""

import json

import pytest

from loraplex.core.errors import ConfigError, UnsupportedFeatureError
from loraplex.core.task import Pool, PoolActivation, PoolKind
from loraplex.models.class_format import read_class_format
from loraplex.models.config_fields import ConfigFields
from loraplex.models.registry import ARCHITECTURES, CLASSIFIERS, read_config

LLAMA = {
    "architectures": ["LlamaForSequenceClassification"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}


def read(tmp_path, **changes):
    """Return the spec and the format of a folder."""
    config = LLAMA | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_config(tmp_path)
    return spec, read_class_format(tmp_path, ConfigFields(config, "config.json"), spec)


def test_two_labels_without_names_by_default(tmp_path):
    spec, classes = read(tmp_path, pad_token_id=7)
    assert (spec.num_labels, spec.has_lm_head, spec.tie_word_embeddings) == (2, False, False)
    assert (classes.num_labels, classes.pad_token_id) == (2, 7)
    assert classes.labels_of(2) == ("LABEL_0", "LABEL_1")
    assert classes.pool() == Pool(
        PoolKind.SCORE, activation=PoolActivation.SOFTMAX, normalize=False
    )
    assert classes.pool(activation=False) == Pool(PoolKind.SCORE, normalize=False)


def test_names_are_for_heads_with_as_many_labels(tmp_path):
    spec, classes = read(tmp_path, id2label={"1": "spam", "0": "ham", "2": "?"}, num_labels=9)
    assert spec.num_labels == 3
    assert classes.labels_of(3) == ("ham", "spam", "?")
    assert classes.labels_of(2) == ("LABEL_0", "LABEL_1")
    assert read(tmp_path, num_labels=5)[0].num_labels == 5


def test_a_model_with_an_output_layer_has_no_head(tmp_path):
    spec, classes = read(tmp_path, architectures=["LlamaForCausalLM"], id2label={"0": "a"})
    assert (spec.num_labels, classes.num_labels, spec.has_lm_head) == (0, 0, True)
    assert classes.labels_of(1) == ("a",)


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"problem_type": "regression"}, PoolActivation.NONE),
        ({"problem_type": "single_label_classification"}, PoolActivation.SOFTMAX),
        ({"problem_type": "multi_label_classification"}, PoolActivation.SIGMOID),
        ({"sbert_ce_default_activation_function": IDENTITY}, PoolActivation.NONE),
        (
            {
                "problem_type": "regression",
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
                "sbert_ce_default_activation_function": IDENTITY,
            },
            PoolActivation.SIGMOID,
        ),
        ({"sentence_transformers": {"version": "6.2.0"}}, PoolActivation.SOFTMAX),
    ],
)
def test_activations(tmp_path, fields, activation):
    assert read(tmp_path, **fields)[1].pool().activation is activation


def test_a_function_that_is_not_computed_leaves_the_scores(tmp_path):
    _, classes = read(tmp_path, sentence_transformers={"activation_fn": "my.module.Squash"})
    with pytest.raises(UnsupportedFeatureError, match=r"my\.module\.Squash") as refused:
        classes.pool()
    assert refused.value.param == "use_activation"
    assert classes.pool(activation=False).activation is PoolActivation.NONE


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"problem_type": "ranking"}, "ranking"),
        ({"id2label": {"1": "a"}}, "id2label"),
        ({"id2label": {"0": "a", "zero": "b"}}, "zero"),
        ({"id2label": ["a"]}, "id2label"),
        ({"num_labels": 0}, "num_labels"),
    ],
)
def test_broken_fields(tmp_path, fields, named):
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, **fields)


def test_every_classifier_is_one_of_a_served_family():
    assert set(CLASSIFIERS.values()) <= set(ARCHITECTURES)
    assert CLASSIFIERS["GPT2ForSequenceClassification"] == "GPT2LMHeadModel"
    assert all(name.endswith("ForSequenceClassification") for name in CLASSIFIERS)


def test_the_activation_of_a_file_of_its_own(tmp_path):
    own = json.dumps({"activation_fn": IDENTITY})
    (tmp_path / "config_sentence_transformers.json").write_text(own)
    assert read(tmp_path)[1].pool().activation is PoolActivation.NONE
