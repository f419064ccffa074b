"""The conversion of docs/adapters.md: PiSSA and OLoRA adapters as plain LoRA on the same base."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.app.builder import base_shapes
from loraplex.core.errors import UnsupportedFeatureError
from loraplex.models.registry import read_config
from support.checkpoints import save_random_model, tiny_sizes

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "adapters.md"
_CODE = re.compile(r"```python\n(from peft import PeftConfig.*?)```", re.DOTALL)
_models: Any = AutoModelForCausalLM


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_documented_conversion(
    init: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    save_random_model(base, LlamaConfig(**tiny_sizes(199)))
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "o_proj"])
    config.init_lora_weights = init
    trained = get_peft_model(_models.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.15 * torch.randn_like(parameter))
    trained.save_pretrained(tmp_path / "adapter")
    request = StageRequest(
        request_id=1,
        path=str(tmp_path / "adapter"),
        state_dir=str(tmp_path / "state"),
        shapes=base_shapes(read_config(base)),
    )
    with pytest.raises(UnsupportedFeatureError, match=r"docs/adapters\.md"):
        stage(request)

    (code,) = _CODE.findall(DOCUMENTATION.read_text())
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code, {"base": _models.from_pretrained(base)})
    plain: Any = PeftModel.from_pretrained(_models.from_pretrained(base), tmp_path / "plain")
    token_ids = torch.tensor([[3, 9, 17, 190]])
    with torch.no_grad():
        found, expected = plain.eval()(token_ids).logits, trained.eval()(token_ids).logits
        untouched = _models.from_pretrained(base)(token_ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert float((found - untouched).abs().max()) > 0.1
    staged = stage(
        StageRequest(
            **{f: getattr(request, f) for f in request.__struct_fields__}
            | {"path": str(tmp_path / "plain")}
        )
    )
    assert staged.source.ranks["q_proj"] == (8, 8)
