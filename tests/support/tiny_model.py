"""A tiny random model in a folder, for what needs a model but no sense: quick, and never at an end by itself."""

from __future__ import annotations

from pathlib import Path

CONTEXT_LENGTH = 4096

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = "the a of to and in is you that it he was for on are with as his they be at one have this from "


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write config, weights and tokenizer; the tokens are bytes and a few English pieces."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_WORDS * 20], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_LENGTH,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        # The end of a turn is never likely, so that answers are as long as a test asks for.
        model.lm_head.weight *= 24
        model.lm_head.weight[tokenizer.eos_token_id] = 0
    model.save_pretrained(folder)
    return folder
