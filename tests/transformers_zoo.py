"""Small random models of the transformers library, each as a Task; tests that use them skip where it is missing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoestring import Adam, Task

VOCABULARY = 100
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1,
    "vocab_size": VOCABULARY, "use_cache": False,
}  # fmt: skip
MOE = {"num_key_value_heads": 2, "use_cache": False}


def ids(rows: int = 4, length: int = 16) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (rows, length))


def text(padded: bool = False) -> dict[str, Any]:
    mask = torch.ones(4, 16, dtype=torch.long)
    if padded:
        mask[1, 10:] = 0
    return {"input_ids": ids(), "attention_mask": mask, "labels": ids()}


def pictures() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(5, (2, 64, 64))}


def _mixtral(**how: Any) -> Callable:
    return lambda tf: (tf.MixtralForCausalLM, tf.MixtralConfig(**TEXT, **SIZES, **MOE, num_local_experts=4, **how))


# name -> what the library has -> (class, configuration), and the batch
MODELS: dict[str, tuple[Callable, Callable]] = {
    "bert": (lambda tf: (tf.BertForMaskedLM, tf.BertConfig(**TEXT, **SIZES)), text),
    "gpt2": (lambda tf: (tf.GPT2LMHeadModel, tf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2,
             use_cache=False, bos_token_id=1, eos_token_id=2)), text),
    "llama": (lambda tf: (tf.LlamaForCausalLM, tf.LlamaConfig(**TEXT, **SIZES, use_cache=False)), text),
    "llama, padded": (lambda tf: (tf.LlamaForCausalLM, tf.LlamaConfig(**TEXT, **SIZES, use_cache=False)),
                      lambda: text(padded=True)),
    "t5": (lambda tf: (tf.T5ForConditionalGeneration, tf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64,
           num_layers=2, num_heads=2, decoder_start_token_id=0, use_cache=False)), text),
    "bart": (lambda tf: (tf.BartForConditionalGeneration, tf.BartConfig(**SEQ2SEQ, max_position_embeddings=64)), text),
    "whisper": (lambda tf: (tf.WhisperForConditionalGeneration, tf.WhisperConfig(**SEQ2SEQ, num_mel_bins=20,
                max_source_positions=50, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=1)),
                lambda: {"input_features": torch.randn(4, 20, 100), "labels": ids()}),
    "wav2vec2": (lambda tf: (tf.Wav2Vec2ForCTC, tf.Wav2Vec2Config(vocab_size=32, **SIZES, conv_dim=(32, 32),
                 conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
                 num_conv_pos_embedding_groups=2, apply_spec_augment=False)),
                 lambda: {"input_values": torch.randn(2, 2000), "labels": torch.randint(1, 32, (2, 8))}),
    "mixtral": (_mixtral(), text),
    "mixtral, one expert after the other": (_mixtral(experts_implementation="eager"), text),
    "qwen2-moe": (lambda tf: (tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig(**TEXT, **SIZES, **MOE, num_experts=4,
                  moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts_per_tok=2,
                  experts_implementation="eager")), text),
    "switch": (lambda tf: (tf.SwitchTransformersForConditionalGeneration, tf.SwitchTransformersConfig(
               vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=2,
               num_experts=4, decoder_start_token_id=0, use_cache=False)), text),
    "segformer": (lambda tf: (tf.SegformerForSemanticSegmentation, tf.SegformerConfig(depths=[1, 1, 1, 1],
                  hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
                  num_labels=5)), pictures),
    "vit": (lambda tf: (tf.ViTForImageClassification, tf.ViTConfig(**SIZES, image_size=64, patch_size=16,
            num_labels=5)), lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(5, (2,))}),
    "convnext": (lambda tf: (tf.ConvNextForImageClassification, tf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32],
                 depths=[1, 1, 1, 1], num_labels=5)),
                 lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(5, (2,))}),
}  # fmt: skip


def loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch).loss


def count(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))


def make(name: str) -> Task:
    """The task of that name, in training mode; the test is skipped where transformers is not installed."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = MODELS[name]
    kind, configuration = model(library)
    return Task(kind(configuration).train(), loss, batch(), Adam(), items=count, name=name)
