"""Which paths of an engine a client may use: all but those that administer it.

As of the engines' own sources and documents in 2026: vLLM (``VLLM_SERVER_DEV_MODE`` routes, LoRA, profiler, sleep,
elastic experts), SGLang (weights, profiler, memory, cache, sessions), llama.cpp (slots, LoRA, models, props).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

ADMINISTRATIVE = frozenset({
    # vLLM
    "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/reset_prefix_cache", "/reset_mm_cache",
    "/reset_encoder_cache", "/server_info", "/start_profile", "/stop_profile", "/scale_elastic_ep",
    "/is_scaling_elastic_ep", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/resume", "/is_paused",
    "/update_weights", "/init_weight_transfer_engine", "/get_world_size", "/abort_requests",
    # SGLang
    "/flush_cache", "/clear_hicache_storage_backend", "/init_weights_update_group", "/update_weights_from_disk",
    "/update_weights_from_distributed", "/update_weights_from_tensor", "/update_weights_from_ipc",
    "/update_weight_version", "/get_weights_by_name", "/destroy_weights_update_group", "/release_memory_occupation",
    "/resume_memory_occupation", "/load_lora_adapter", "/unload_lora_adapter", "/start_expert_distribution_record",
    "/stop_expert_distribution_record", "/dump_expert_distribution_record", "/set_internal_state",
    "/get_internal_state", "/set_trace_level", "/configure_logging", "/abort_request", "/pause_generation",
    "/continue_generation", "/open_session", "/close_session", "/get_server_info", "/slow_down", "/freeze_gc",
    "/hicache", "/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance",
    "/load_lora_adapter_from_tensors",
    # llama.cpp
    "/slots", "/props", "/lora-adapters", "/models/load", "/models/unload",
    # servers of any kind
    "/admin", "/debug", "/shutdown", "/quit",
})  # fmt: skip
DEEPEST = max(each.count("/") for each in ADMINISTRATIVE)


def normal(path: str) -> str | None:
    """The path as an engine may understand it, however it is written; None where it can be understood in two ways.

    Args:
        path: of a request, still with its percent signs, without the query.
    """
    plain = unquote(path)
    if "%" in plain or "\\" in plain or not plain.startswith("/") or re.search(r"[\x00-\x20\x7f;?#]", plain):
        return None
    parts = plain.split("/")[1:]
    if any(part in (".", "..") for part in parts) or "" in parts[:-1] or "%2f" in path.lower():
        return None
    return plain


def is_open(path: str, allowed: Sequence[str]) -> bool:
    """Whether clients may use a path, as ``normal`` returned it; ``allowed`` are those of the configuration."""
    lower = path.lower().rstrip("/")
    parts = lower.split("/", DEEPEST + 1)
    if ADMINISTRATIVE.isdisjoint("/".join(parts[: count + 1]) for count in range(1, DEEPEST + 1)):
        return True

    def is_below(prefix: str) -> bool:
        return lower == prefix or lower.startswith(prefix + "/")

    return any(is_below(each.lower().rstrip("/")) for each in allowed)
