"""What the templates of TensorRT-LLM's model repository leave to be filled in, in addition to
parameters of their own name.
"""

from typing import Final

from loraplex.core.support import Feature, Support

_ONE_PATH = "any number of requests run together"

TEMPLATE_VARIABLES: Final = (
    Feature("triton_max_batch_size", note="the largest batch of a request [the build's]"),
    Feature("triton_backend", note="tensorrtllm or python: the same"),
    Feature("decoupled_mode", note="several responses to a request [False]"),
    Feature("engine_dir", note="the parameter gpt_model_path"),
    Feature("batching_strategy", note="the parameter gpt_model_type"),
    Feature("encoder_engine_dir", note="the parameter encoder_model_path"),
    Feature("max_queue_size", note="the setting `max_queue_size`; 0: any number may wait"),
    Feature("max_queue_delay_microseconds", note="the setting `max_queue_delay_microseconds`"),
    Feature("logits_datatype", note="of context_logits and generation_logits [TYPE_FP32]"),
    *(
        Feature(name, Support.NO_EFFECT, _ONE_PATH)
        for name in (
            "preprocessing_instance_count",
            "postprocessing_instance_count",
            "bls_instance_count",
        )
    ),
    Feature("encoder_input_features_data_type", Support.NO_EFFECT, "of encoder-decoder models"),
    Feature("prompt_embedding_table_data_type", Support.NO_EFFECT, "of prompt tuning"),
)
