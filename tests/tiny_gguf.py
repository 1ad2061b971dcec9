"""A tiny GGUF file of the default model's kind."""

from pathlib import Path

import gguf
import numpy as np

NUM_LAYERS, WIDTH, NUM_HEADS, NUM_KV_HEADS, MLP_WIDTH = 2, 64, 4, 2, 96
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"


def write_tiny_gguf(path: Path) -> None:
    """Write a file of the default model's kind: packed to four bits, q and k permuted, tied output."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3 if token in CONTROL_TOKENS else 1 for token in vocabulary()])
    writer.add_token_merges(["h e", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, (rows, columns) in matrix_shapes().items():
        kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd" else gguf.GGMLQuantizationType.Q4_1
        values = np.random.default_rng(rows + len(name)).standard_normal((rows, columns), dtype=np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ["output_norm", *[f"blk.{i}.{part}_norm" for i in range(NUM_LAYERS) for part in ("attn", "ffn")]]:
        writer.add_tensor(f"{name}.weight", np.linspace(0.5, 1.5, WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary() -> list[str]:
    """Return the byte letters that byte-level tokenizers use, two merges, and the control tokens in front."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*CONTROL_TOKENS, *sorted(ByteLevel.alphabet()), "he", "ĊĊ"]


def matrix_shapes() -> dict[str, tuple[int, int]]:
    head_dim = WIDTH // NUM_HEADS
    shapes = {"token_embd": (len(vocabulary()), WIDTH)}
    for i in range(NUM_LAYERS):
        shapes |= {
            f"blk.{i}.attn_q": (WIDTH, WIDTH),
            f"blk.{i}.attn_k": (NUM_KV_HEADS * head_dim, WIDTH),
            f"blk.{i}.attn_v": (NUM_KV_HEADS * head_dim, WIDTH),
            f"blk.{i}.attn_output": (WIDTH, WIDTH),
            f"blk.{i}.ffn_gate": (MLP_WIDTH, WIDTH),
            f"blk.{i}.ffn_up": (MLP_WIDTH, WIDTH),
            f"blk.{i}.ffn_down": (WIDTH, MLP_WIDTH),
        }
    return shapes
