"""Write a tiny chat model of random weights, with a tokenizer of single bytes: nothing is fetched from anywhere.

python tiny_chat_model.py FOLDER [ascii]      # ascii: it knows and says printable characters of ASCII alone
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>"]


def main(folder: str, letters: str = "bytes") -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if letters == "ascii":
        alphabet = [each for each in alphabet if each.isascii()]
    words = {word: number for number, word in enumerate([*SPECIAL, *alphabet])}
    bare = Tokenizer(models.BPE(vocab=words, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(18)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        head_dim=32,  # vLLM's kernels for CPUs know no smaller one
        max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
