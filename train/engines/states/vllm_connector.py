"""Writes hidden states from inside vLLM. vLLM loads this file; it must not import ours.

vLLM's own connector needs CUDA. This one does the same on a CPU. It also lets an answer go on for
one token after its end, because vLLM has no states of a text's last token. All else is vLLM's.
"""

from functools import partial
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

# What this file calls and reads of vLLM's connector that vLLM does not promise to keep.
METHODS = ("_submit_async_write", "_write_tensors", "_on_write_done")
STATE = (
    *("_kv_cache", "_block_size", "_is_tp_rank_zero"),
    *("_executor", "_lock_fds", "_req_copy_events"),
)


class _Done:
    """The event of a copy that is over, in place of a CUDA event."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class StatesConnector(ExampleHiddenStatesConnector):
    """Writes a safetensors file for each request: `hidden_states` [n, layers, H] and `token_ids`
    [n]. The file beside it that ends in `.lock` is locked until the first one is complete.

    A request that ignores its end and has `end_token_ids` in its `kv_transfer_params` ends after
    the step that reads one of these ids.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answering: dict[str, Any] = {}  # requests, by id

    def update_state_after_alloc(self, request: Any, *args: Any) -> None:
        super().update_state_after_alloc(request, *args)
        if (request.kv_transfer_params or {}).get("end_token_ids"):
            self._answering[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """vLLM calls this for each step, when it has chosen the step's requests."""
        for request in self._answering.values():
            ends = request.kv_transfer_params["end_token_ids"]
            # One step gives two tokens at most. Other steps may be on their way.
            if not set(ends).isdisjoint(request.output_token_ids[-2:]):
                request.max_tokens = request.num_output_tokens + 1
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._answering.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM calls this once, before any request. Raises RuntimeError on a CPU if vLLM's own
        connector has other names by now."""
        super().register_kv_caches(kv_caches)
        missing = [name for name in METHODS if not hasattr(ExampleHiddenStatesConnector, name)]
        missing += [name for name in STATE if name not in vars(self)]
        if missing and any(cache.device.type == "cpu" for cache in kv_caches.values()):
            raise RuntimeError(
                f"vLLM {vllm.__version__} has no {', '.join(missing)} in its connector for hidden "
                "states, which writing them on a CPU needs. Use an older vLLM, or a GPU"
            )

    def _submit_async_write(self, pending: Any) -> None:
        cache = self._kv_cache
        if cache is None or cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        size = self._block_size
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()
        tensors = {
            # A copy: the blocks are free for other requests from now on.
            "hidden_states": extract_from_kv_cache(cache, slots, len(pending.token_ids)).clone(),
            "token_ids": pending.token_ids.clone(),
        }
        done, lock = _Done(), self._lock_fds.pop(pending.req_id, None)
        self._req_copy_events[pending.req_id] = done
        written = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        # Logs what went wrong.
        written.add_done_callback(partial(self._on_write_done, pending.req_id))
