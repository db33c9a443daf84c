"""An engine that was unloaded leaves its memory to the next one."""

import gc
import weakref

import pytest

from scripts.eagle3.capture import EXTENSION
from scripts.eagle3.engine import Hardware, load_engine, unload_engine

HARDWARE = Hardware(batch_tokens=512, max_num_seqs=4, kv_cache_gb=1)


@pytest.mark.parametrize("name", ["tiny_llama", pytest.param("tiny_kimi", marks=pytest.mark.slow)])
def test_an_unloaded_engine_leaves_no_weights_though_engine_and_model_are_still_referred_to(name, request):
    target = request.getfixturevalue(name)
    llm = load_engine(target, HARDWARE, max_model_len=128, eager=True, worker_extension=EXTENSION)
    (model,) = llm.apply_model(lambda model: model)
    tensors = [*model.parameters(), *model.buffers()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) > 1_000_000
    unload_engine(llm)
    assert llm is not None and model is not None
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0


def test_an_unloaded_engine_leaves_no_model(tiny_llama):
    llm = load_engine(tiny_llama, HARDWARE, max_model_len=128, eager=True, worker_extension=EXTENSION)
    (model,) = llm.apply_model(weakref.ref)
    assert model() is not None
    unload_engine(llm)
    gc.collect()
    assert llm is not None and model() is None
