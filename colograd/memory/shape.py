"""Bytes that follow from a decoder's shape: of activations, the engine's steps, the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..engine.arguments import MOST_SEQUENCES
from ..policy.logprobs import TILE_ELEMENTS

ENGINE_TOKENS = 16384  # of one step of the engine: vLLM's default for `LLM` on large GPUs
BLOCK = 128  # tokens of a KV block in vLLM, at most: less in most attention backends
# Completions are planned at this part of the longest: the shorter they are, the more often a row's tokens join a
# prompt's keys. Rows of shorter ones still are rare, and packed again where memory runs out.
SHORT = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder, in elements."""

    layers: int
    hidden: int
    intermediate: int  # of the MLPs that one token goes through
    queries: int  # heads * head size
    keys: int  # key-value heads * head size
    head: int  # size of one
    vocabulary: int

    @classmethod
    def of(cls, model_config: Any) -> Shape:
        """From a transformers configuration; what it doesn't name is guessed as GPT-2 has it."""
        config = model_config.get_text_config()

        def size(name: str, default: int) -> int:
            value = getattr(config, name, None) or default
            return int(max(value) if isinstance(value, list | tuple) else value)  # some have one per layer

        hidden, heads = size("hidden_size", 0), size("num_attention_heads", 1)
        head, inner = size("head_dim", hidden // heads), size("intermediate_size", 4 * hidden)
        if experts := size("num_experts_per_tok", 0):
            inner = experts * size("moe_intermediate_size", inner)
        return cls(
            layers=size("num_hidden_layers", 0),
            hidden=hidden,
            intermediate=inner,
            queries=heads * head,
            keys=size("num_key_value_heads", heads) * head,
            head=head,
            vocabulary=size("vocab_size", 0),
        )

    def split(self, ranks: int) -> Shape:
        """Of one of ``ranks`` that share each layer: heads, MLPs and the vocabulary are cut, but each has a key-value
        head."""
        return replace(
            self,
            intermediate=-(-self.intermediate // ranks),
            queries=-(-self.queries // ranks),
            keys=max(self.keys // ranks, self.head),
            vocabulary=-(-self.vocabulary // ranks),
        )


@dataclass(frozen=True, slots=True)
class Lengths:
    """The longest that a row is made of, in tokens."""

    prompt: int
    completion: int
    group: int  # completions that share a prompt in a row; 1 where rows are padded

    def joined_keys(self, tokens: int) -> float:
        """Keys that attention reads, per token of a row of ``tokens``.

        Each completion's are joined with its prompt's (`policy.attention`). A row that is one sequence has 1; groups
        of 8 completions far shorter than their prompt nearly 9.
        """
        if self.group == 1:
            return 1.0
        count, short = self._short(tokens)
        return (self.prompt + count * (self.prompt + short)) / (self.prompt + count * short)

    def prompts_share(self, tokens: int) -> float:
        """Of a row's tokens, those that are prompts', once for all completions of each."""
        count, short = self._short(tokens)
        return self.prompt / (self.prompt + count * short)

    def _short(self, tokens: int) -> tuple[int, int]:
        """Short completions of a prompt that a row of ``tokens`` has, and the tokens of one."""
        short = max(1, self.completion // SHORT)
        return min(self.group, max(1, (tokens - self.prompt) // short)), short


def layer_bytes(shape: Shape, itemsize: int, joined: float = 1.0) -> float:
    """Bytes that one decoder layer keeps for the backward pass, per token.

    Counted on transformers' Llama layer, as arXiv 2205.05198 (section 4.1) counts a GPT layer, without the attention
    matrix, which fused attention never stores. Each of two RMSNorms: its float32 input, the normalised and the scaled
    output. Attention: queries, keys and values (and ``joined`` of each more where they are joined with their prompt's),
    its output and the copy that the projection reads. MLP: gate, activated gate, up, product.
    """
    norms = 2 * shape.hidden * (4 + 2 * itemsize)
    return norms + itemsize * (3 * shape.queries + (2 + 2 * joined) * shape.keys + 4 * shape.intermediate)


def activation_bytes(
    shape: Shape, tokens: int, itemsize: int, checkpointing: int, device: str, joined: float = 1.0
) -> int:
    """An estimate of the peak of one forward and backward beside weights and gradients.

    Without checkpointing every layer's `layer_bytes`; with it, of each ``checkpointing``-th layer its input only, and
    one such layer's `layer_bytes`. To both come the gradients inside one layer, the final norm, the head's input and
    its gradient, the tiles of logits (two of float32, see `logprobs`), and the gradient of the head's weight before it
    is added to the one there is. SmolLM2-135M in bfloat16 on a CPU: 964 and 1,757 MiB for 1,024 and 2,048 tokens where
    953 and 1,697 were measured, with checkpointing 248 for 1,024 where it were 272.
    """
    layer = layer_bytes(shape, itemsize, joined)
    again = -(-shape.layers // checkpointing) if checkpointing else 0  # layers that are computed again
    kept = (shape.layers - again) * layer + again * shape.hidden * itemsize + (layer if again else 0)
    head = shape.hidden * (8 + 3 * itemsize)
    tiles = 2 * 4 * TILE_ELEMENTS.get(device, 2**24)
    inside = _gradients_inside(shape, itemsize, device, joined)
    return int(tokens * (kept + inside + head)) + tiles + 4 * shape.vocabulary * shape.hidden


def _gradients_inside(shape: Shape, itemsize: int, device: str, joined: float) -> float:
    """The most that gradients inside one layer take at once, per token: in its MLP or in its attention, whose backward
    begins when what the MLP kept is freed."""
    mlp = itemsize * 2 * (shape.intermediate + shape.hidden)
    attention = itemsize * (joined * 2 * shape.keys - 4 * shape.intermediate)
    if device == "cuda":
        # Flash attention's backward sums the queries' gradients in float32, and writes the keys' and values' for each
        # query head before it adds them up.
        spread = 0 if shape.keys == shape.queries else itemsize * joined * 2 * shape.queries
        attention += 4 * shape.queries + spread
    return max(mlp, attention)


def engine_bytes(shape: Shape, sequences: int, itemsize: int) -> int:
    """An estimate of what the engine needs beside weights and KV cache: one step's activations, which aren't kept from
    layer to layer, and three float32 tensors of logits while it samples."""
    step = ENGINE_TOKENS * itemsize * (4 * shape.hidden + 2 * shape.intermediate)
    return step + 3 * 4 * min(sequences, MOST_SEQUENCES) * shape.vocabulary


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """What a generation asks of the KV cache, in bytes."""

    per_token: int
    least: int  # one sequence at full length
    wanted: int  # every sequence of a generation at full length: more would never be used

    @classmethod
    def of(cls, shape: Shape, itemsize: int, length: int, sequences: int) -> CacheNeed:
        """Of ``sequences`` sequences of up to ``length`` tokens.

        One token takes a key and a value per layer: 2 * layers * key heads * head size * itemsize. (An upper bound
        where a layer keeps a window only.)
        """
        per_token = 2 * shape.layers * shape.keys * itemsize
        # vLLM keeps a block for itself, and a sequence's last block is partly empty.
        return cls(per_token, (length + 2 * BLOCK) * per_token, (sequences + 1) * (length + BLOCK) * per_token)
