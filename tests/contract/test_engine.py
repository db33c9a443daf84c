"""An engine that was unloaded leaves its memory to the next one."""

import gc
import weakref

import pytest

from scripts.eagle3.capture import EXTENSION
from scripts.eagle3.engine import Hardware, load_engine, unload_engine

HARDWARE = Hardware(batch_tokens=512, max_num_seqs=4, kv_cache_gb=1)


@pytest.mark.parametrize("name", ["tiny_llama", pytest.param("tiny_kimi", marks=pytest.mark.slow)])
def test_an_unloaded_engine_leaves_no_model_though_it_is_still_referred_to(name, request):
    target = request.getfixturevalue(name)
    llm = load_engine(target, HARDWARE, max_model_len=128, eager=True, worker_extension=EXTENSION)
    (model,) = llm.apply_model(weakref.ref)
    assert model() is not None
    unload_engine(llm)
    gc.collect()
    assert llm is not None and model() is None
