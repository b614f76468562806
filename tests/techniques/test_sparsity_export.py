"""What transformers save of a model with sparse layers is the plain model, and comes back as it was."""

import pytest
import torch

from shoestring import Adam, Plan, Task, apply
from shoestring.techniques import sparsity
from shoestring.techniques.sparsity.layer import SparseLayer

transformers = pytest.importorskip("transformers")


def bert():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=60, **sizes))


def llama():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, **sizes))


def t5():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=60, **sizes))


def task_of(build):
    torch.manual_seed(0)
    ids = torch.randint(60, (2, 6))
    return Task(build().eval(), lambda model, ids: model(input_ids=ids, labels=ids).loss, ids, Adam())


@pytest.mark.filterwarnings("ignore:.*stays dense")
@pytest.mark.parametrize("build", [bert, llama, t5])
def test_a_sparse_model_is_saved_and_loaded_as_the_plain_one(build, tmp_path):
    task = task_of(build)
    keys = set(task.model.state_dict())
    lean = apply(sparsity.apply(task, sparsity.Settings(30, frequency_multiplier=100)), Plan())
    for _ in range(3):
        lean.step(task.batch)
    assert lean.task.after_update[0].times and set(lean.model.state_dict()) == keys
    lean.model.save_pretrained(tmp_path)
    back, info = type(lean.model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    sparse = {name: layer for name, layer in lean.model.named_modules() if isinstance(layer, SparseLayer)}
    assert len(sparse) > 5
    for name, layer in sparse.items():
        assert torch.equal(back.get_parameter(f"{name}.weight"), layer.dense_weight())
    for name, tensor in lean.model.named_parameters():
        assert name.endswith(".values") or torch.equal(back.get_parameter(name), tensor)
    with torch.no_grad():
        inputs = {"input_ids": task.batch, "labels": task.batch}
        torch.testing.assert_close(back.eval()(**inputs).logits, lean.model.eval()(**inputs).logits)


@pytest.mark.filterwarnings("ignore:.*stays dense")
@pytest.mark.parametrize("build", [llama, t5])
def test_a_sparse_model_generates(build):
    task = task_of(build)
    lean = apply(task, Plan(nonzero=30))
    lean.step(task.batch)
    assert lean.model.eval().generate(task.batch, max_new_tokens=3).shape[0] == 2
