"""Write a tiny model of random weights in llama.cpp's own format, with single bytes as tokens; it says ASCII alone.

python tiny_gguf_model.py FILE
"""

from __future__ import annotations

import sys

import numpy as np
from gguf import GGUFWriter, TokenType

WIDTH, INNER, LAYERS, HEADS, LENGTH = 256, 1024, 8, 4, 4096
SPECIAL = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]


def main(path: str) -> None:
    chance = np.random.default_rng(18)
    tokens = [*SPECIAL, *((f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256))]
    model = GGUFWriter(path, "llama")
    model.add_context_length(LENGTH)
    model.add_embedding_length(WIDTH)
    model.add_block_count(LAYERS)
    model.add_feed_forward_length(INNER)
    model.add_head_count(HEADS)
    model.add_layer_norm_rms_eps(1e-5)
    model.add_rope_dimension_count(WIDTH // HEADS)
    model.add_tokenizer_model("llama")
    model.add_token_list([text for text, _ in tokens])
    model.add_token_scores([0.0] * len(tokens))
    model.add_token_types([kind for _, kind in tokens])
    model.add_unk_token_id(0)
    model.add_bos_token_id(1)
    model.add_eos_token_id(2)
    model.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    def random(*shape: int) -> np.ndarray:
        return chance.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    head = random(len(tokens), WIDTH)
    head[: len(SPECIAL) + 32] = head[len(SPECIAL) + 127 :] = 0  # below the best of the others
    ones = np.ones(WIDTH, np.float32)
    model.add_tensor("token_embd.weight", random(len(tokens), WIDTH))
    for layer in range(LAYERS):
        for name, shape in (("attn_q", (WIDTH, WIDTH)), ("attn_k", (WIDTH, WIDTH)), ("attn_v", (WIDTH, WIDTH)),
                            ("attn_output", (WIDTH, WIDTH)), ("ffn_gate", (INNER, WIDTH)), ("ffn_up", (INNER, WIDTH)),
                            ("ffn_down", (WIDTH, INNER))):  # fmt: skip
            model.add_tensor(f"blk.{layer}.{name}.weight", random(*shape))
        model.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        model.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
    model.add_tensor("output_norm.weight", ones)
    model.add_tensor("output.weight", head)
    model.write_header_to_file()
    model.write_kv_data_to_file()
    model.write_tensors_to_file()
    model.close()


if __name__ == "__main__":
    main(sys.argv[1])
