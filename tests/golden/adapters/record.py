"""Records what transformers and peft compute with adapters on the tiny decoders beside this folder.

    python tests/golden/adapters/record.py

For each case a folder in peft's own layout, and logits.safetensors: input_ids (T), logits (T, vocab) with the adapter,
greedy_ids of 12 more tokens, and merged_logits (T, vocab) of the model that peft merged. Written with transformers
5.24.0, peft 0.21.2, torch 2.13.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_all": ("llama_gqa", {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP, "lm_head"]}),
    "llama_rslora": (
        "llama_gqa",
        {"r": 9, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    ),
    "llama_patterns": (
        "llama_gqa",
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "down_proj"],
            "layers_to_transform": [1],
            "rank_pattern": {"down_proj": 17},
            "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 9, "mlp.down_proj": 5},
        },
    ),
    "phi3_fused": ("phi3_fused", {"r": 4, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "gemma3_sandwich": ("gemma3_text", {"r": 8, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP]}),
    "qwen3_5_hybrid": (
        "qwen3_5",
        {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, "in_proj_qkv", "in_proj_a", "out_proj", "up_proj"]},
    ),
    "qwen2_bias": ("qwen2_bias", {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, "down_proj"]}),
}


def record(case: str, base: str, settings: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    folder = HERE.parent / ("qwen3_5/lm" if base == "qwen3_5" else f"tiny_decoders/{base}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights="gaussian", **settings)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3 if "lora_A" in name else 0.2)
    model.peft_config["default"].base_model_name_or_path = base  # not the path that it had here
    model.save_pretrained(HERE / case, save_embedding_layers=False)
    (HERE / case / "README.md").unlink(missing_ok=True)
    ids = torch.randint(3, model.config.vocab_size, (1, 40))
    with torch.inference_mode():
        logits = model(ids).logits[0]
        greedy = ids
        for _ in range(12):
            greedy = torch.cat((greedy, model(greedy).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        merged = model.merge_and_unload()(ids).logits[0]
    tensors = {"input_ids": ids[0], "logits": logits, "greedy_ids": greedy[0, 40:], "merged_logits": merged}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, HERE / case / "logits.safetensors")


if __name__ == "__main__":
    for number, (case, (base, settings)) in enumerate(CASES.items()):
        record(case, base, settings, seed=number)
