"""Real architectures of transformers and diffusers as small tasks with random weights: name -> a Task.

No weights are downloaded. Configurations are the libraries' own but for sizes: dropout, caches and initialisation are
what a user gets. Sizes are such that a training step takes some tens of megabytes.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import numpy
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

from shoestring import Adam, Task

BATCH, LENGTH, VOCABULARY = 8, 64, 1000
ENCODER = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512,
}  # fmt: skip
TOKENS = {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
DECODER = ENCODER | TOKENS | {"num_key_value_heads": 2}


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def images(size: int = 64) -> Tensor:
    return torch.randn(BATCH, 3, size, size)


def labels(classes: int = 10) -> Tensor:
    return torch.randint(classes, (BATCH,))


def text(targets: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long), "labels": targets}


def causal() -> dict[str, Tensor]:
    tokens = ids()
    return text(tokens) | {"input_ids": tokens}


def pairs() -> dict[str, Tensor]:
    return text(ids(32))


def pictures(size: int = 64) -> dict[str, Tensor]:
    return {"pixel_values": images(size), "labels": labels()}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model returns when it is given labels."""
    return model(**batch).loss


def boxes_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Classes and boxes of each query against given ones: the matching of DETR needs SciPy, and is no part of it."""
    output = model(pixel_values=batch["pixel_values"])
    return F.cross_entropy(output.logits.flatten(0, 1), batch["classes"].flatten()) + F.l1_loss(
        output.pred_boxes, batch["boxes"]
    )


def noise_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["noisy"], batch["time"]).sample, batch["noise"])


def autoencoding_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["pixel_values"]).sample, batch["pixel_values"])


def bert():
    return tf.BertForSequenceClassification(tf.BertConfig(**ENCODER, **TOKENS, num_labels=10)), text(labels())


def roberta():
    return tf.RobertaForSequenceClassification(tf.RobertaConfig(**ENCODER, **TOKENS, num_labels=10)), text(labels())


def distilbert():
    config = tf.DistilBertConfig(dim=128, n_layers=4, n_heads=4, hidden_dim=512, **TOKENS)
    return tf.DistilBertForMaskedLM(config), causal()


def gpt2():
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=VOCABULARY)), causal()


def llama():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER)), causal()


def gemma():
    return tf.GemmaForCausalLM(tf.GemmaConfig(**DECODER, head_dim=32)), causal()


def mistral():
    return tf.MistralForCausalLM(tf.MistralConfig(**DECODER)), causal()


def qwen2():
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**DECODER)), causal()


def mixtral():
    return tf.MixtralForCausalLM(tf.MixtralConfig(**DECODER, num_local_experts=4)), causal()


def opt():
    config = tf.OPTConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, ffn_dim=512,
                          word_embed_proj_dim=128, **TOKENS)  # fmt: skip
    return tf.OPTForCausalLM(config), causal()


def mamba():
    return tf.MambaForCausalLM(tf.MambaConfig(hidden_size=128, num_hidden_layers=4, vocab_size=VOCABULARY)), causal()


def t5():
    config = tf.T5Config(d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4, vocab_size=VOCABULARY,
                         decoder_start_token_id=0)  # fmt: skip
    return tf.T5ForConditionalGeneration(config), pairs()


def _coder() -> dict[str, int]:
    """The sizes of an encoder and a decoder."""
    sizes = {"layers": 3, "attention_heads": 4, "ffn_dim": 512}
    both = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    return both | {"d_model": 128}


def bart():
    return tf.BartForConditionalGeneration(tf.BartConfig(**_coder(), **TOKENS)), pairs()


def whisper():
    config = tf.WhisperConfig(**_coder(), vocab_size=VOCABULARY, num_mel_bins=40, max_source_positions=64,
                              max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                              decoder_start_token_id=1, begin_suppress_tokens=None)  # fmt: skip
    batch = {"input_features": torch.randn(BATCH, 40, 128), "labels": ids(32)}
    return tf.WhisperForConditionalGeneration(config), batch


def _speech(kind: str):
    config = getattr(tf, f"{kind}Config")(
        **ENCODER, conv_dim=(64,) * 4, conv_stride=(5, 2, 2, 2), conv_kernel=(10, 3, 3, 3), num_feat_extract_layers=4,
        num_conv_pos_embeddings=16, num_labels=10, classifier_proj_size=64, mask_time_length=2,
    )  # fmt: skip
    model = getattr(tf, f"{kind}ForSequenceClassification")(config)
    return model, {"input_values": torch.randn(BATCH, 4000), "labels": labels()}


def wav2vec2():
    return _speech("Wav2Vec2")


def hubert():
    return _speech("Hubert")


def vit():
    return tf.ViTForImageClassification(tf.ViTConfig(**ENCODER, image_size=64, patch_size=8, num_labels=10)), pictures()


def dinov2():
    config = tf.Dinov2Config(**{k: v for k, v in ENCODER.items() if k != "intermediate_size"}, image_size=64,
                             patch_size=8, num_labels=10)  # fmt: skip
    return tf.Dinov2ForImageClassification(config), pictures()


def swin():
    config = tf.SwinConfig(image_size=64, patch_size=2, embed_dim=48, depths=[2, 2, 2], num_heads=[3, 6, 12],
                           window_size=4, num_labels=10)  # fmt: skip
    return tf.SwinForImageClassification(config), pictures()


def segformer():
    config = tf.SegformerConfig(depths=[2, 2, 2, 2], hidden_sizes=[32, 64, 96, 128], decoder_hidden_size=64,
                                num_attention_heads=[1, 2, 4, 8], num_labels=5)  # fmt: skip
    return tf.SegformerForSemanticSegmentation(config), {
        "pixel_values": images(64), "labels": torch.randint(5, (BATCH, 64, 64))
    }  # fmt: skip


def convnext():
    config = tf.ConvNextConfig(hidden_sizes=[32, 64, 128, 192], depths=[2, 2, 3, 2], num_labels=10)
    return tf.ConvNextForImageClassification(config), pictures()


def resnet():
    config = tf.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 192, 256], depths=[2, 2, 2, 2],
                             layer_type="basic", num_labels=10)  # fmt: skip
    return tf.ResNetForImageClassification(config), pictures()


def clip():
    vision = {**ENCODER, "image_size": 64, "patch_size": 8, "projection_dim": 64}
    config = tf.CLIPConfig(text_config={**ENCODER, **TOKENS, "projection_dim": 64, "eos_token_id": 2},
                           vision_config=vision, projection_dim=64)  # fmt: skip
    return tf.CLIPModel(config), {"input_ids": ids(32), "pixel_values": images(), "return_loss": True}


def detr():
    backbone = tf.ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 1, 1],
                               layer_type="basic", out_features=["stage4"])  # fmt: skip
    config = tf.DetrConfig(use_timm_backbone=False, backbone=None, use_pretrained_backbone=False, num_queries=16,
                           backbone_config=backbone, num_labels=5, **_coder())  # fmt: skip
    batch = {"pixel_values": images(96), "classes": torch.randint(6, (BATCH, 16)), "boxes": torch.rand(BATCH, 16, 4)}
    return tf.DetrForObjectDetection(config), batch


def unet2d():
    model = diffusers.UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"), norm_num_groups=8,
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    batch = {"noisy": images(32), "time": torch.randint(1000, (BATCH,)), "noise": images(32)}
    return model, batch


def autoencoder_kl():
    model = diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(32, 64), latent_channels=4, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=32,
    )  # fmt: skip
    return model, {"pixel_values": images(32)}


def gpt_neox():
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**ENCODER, **TOKENS)), causal()


def bloom():
    config = tf.BloomConfig(hidden_size=128, n_layer=4, n_head=4, vocab_size=VOCABULARY)
    return tf.BloomForCausalLM(config), causal()


def modernbert():
    config = tf.ModernBertConfig(**ENCODER, **TOKENS, num_labels=10, pad_token_id=0, local_attention=16)
    return tf.ModernBertForSequenceClassification(config), text(labels())


def mpnet():
    return tf.MPNetForSequenceClassification(tf.MPNetConfig(**ENCODER, **TOKENS, num_labels=10)), text(labels())


def olmoe():
    return tf.OlmoeForCausalLM(tf.OlmoeConfig(**DECODER, num_experts=8, num_experts_per_tok=2)), causal()


def mamba2():
    config = tf.Mamba2Config(hidden_size=128, num_hidden_layers=4, num_heads=8, head_dim=32, state_size=32,
                             n_groups=2, vocab_size=VOCABULARY, chunk_size=32)  # fmt: skip
    return tf.Mamba2ForCausalLM(config), causal()


def regnet():
    config = tf.RegNetConfig(embedding_size=32, hidden_sizes=[32, 64, 96, 128], depths=[1, 2, 2, 1], groups_width=16,
                             layer_type="y", num_labels=10)  # fmt: skip
    return tf.RegNetForImageClassification(config), pictures()


def mobilevit():
    config = tf.MobileViTConfig(image_size=64, hidden_sizes=[48, 64, 80], num_labels=10,
                                neck_hidden_sizes=[16, 16, 24, 32, 48, 64, 96])  # fmt: skip
    return tf.MobileViTForImageClassification(config), pictures()


def focalnet():
    config = tf.FocalNetConfig(image_size=64, patch_size=4, embed_dim=48, depths=[2, 2, 2], focal_levels=[2, 2, 2],
                               focal_windows=[3, 3, 3], hidden_sizes=[48, 96, 192], num_labels=10)  # fmt: skip
    return tf.FocalNetForImageClassification(config), pictures()


def patchtst():
    config = tf.PatchTSTConfig(num_input_channels=4, context_length=256, prediction_length=32, patch_length=8,
                               patch_stride=8, d_model=64, num_hidden_layers=4, num_attention_heads=4,
                               ffn_dim=256)  # fmt: skip
    return tf.PatchTSTForPrediction(config), {
        "past_values": torch.randn(BATCH, 256, 4), "future_values": torch.randn(BATCH, 32, 4)
    }  # fmt: skip


def vit_mae():
    config = tf.ViTMAEConfig(**ENCODER, image_size=64, patch_size=8, decoder_hidden_size=64,
                             decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
                             decoder_intermediate_size=256)  # fmt: skip
    return tf.ViTMAEForPreTraining(config), {"pixel_values": images()}


LOSSES = {"detr": boxes_loss, "unet2d": noise_loss, "autoencoder_kl": autoencoding_loss}
MODELS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (
        bert, roberta, distilbert, gpt2, llama, gemma, mistral, qwen2, mixtral, opt, mamba, t5, bart, whisper, wav2vec2,
        vit, dinov2, swin, segformer, convnext, resnet, clip, detr, unet2d, autoencoder_kl,
        gpt_neox, bloom, modernbert, mpnet, olmoe, mamba2, hubert, regnet, mobilevit, focalnet, patchtst, vit_mae,
    )
}  # fmt: skip


def seed_all(seed: int) -> None:
    """Wav2Vec2 draws its masks with NumPy."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)


def task(name: str, seed: int = 0) -> Task:
    """A model by its name -> its task, with the same weights and the same batch for the same seed."""
    seed_all(seed)
    model, batch = MODELS[name]()
    model.train()
    return Task(model, LOSSES.get(name, own_loss), batch, Adam(lr=1e-3), name=name)
