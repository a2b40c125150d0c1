"""Bytes of activations and of the KV cache, computed from the sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..policy.attention import IN_PLACE_FROM
from ..policy.head import TILE_ELEMENTS
from ..runtime import registry
from ..runtime.sizes import size_of

BLOCK = 128  # Tokens of a KV cache block in the plan. Most attention backends of vLLM have smaller blocks.

# The plan of copied keys assumes completions of 1/SHORT of the longest completion's tokens. Each completion in a row
# copies its prompt's keys, so many short completions need more memory than a few long ones.
SHORT = 8

FLASH_ROWS, FLASH_HEAD_STEP = 128, 32  # Flash attention's backward pads rows and head sizes to multiples of these.

SCORE = 8  # Bytes kept per soft-capped attention score: tanh, softmax in float32, and softmax in the row's dtype.

# Model type -> number of tensors that an MLP keeps, if not 4. gpt-oss clamps the gate, and multiplies by its sigmoid.
GATED = {"gpt_oss": 7}

# Model type -> norms per layer, if more than two: before and after attention, and before and after the MLP.
NORMS = {"gemma2": 4, "gemma3": 4, "gemma3_text": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes from which a decoder model's memory is computed, e.g. number of layers, hidden size and vocabulary size."""

    layers: int
    hidden: int
    intermediate: int  # Total intermediate size of the MLPs that one token goes through.
    queries: int  # Number of query heads * head size.
    keys: int  # Number of key-value heads * head size.
    head: int
    vocabulary: int
    tied: bool = False
    experts: int = 0  # Number of experts that one token goes through. 0 without a mixture.
    gated: int = 4  # Tensors of intermediate size that an MLP keeps: gate, activated gate, up, product.
    norms: int = 2
    window: int = 0  # Maximum tokens that sliding-window layers see. 0 means that all layers see all tokens.
    copies: bool = False  # Whether attention copies keys, because it has soft caps or dropout.
    capped: int = 0  # Heads with scores in memory, because no fused kernel supports soft caps.

    @classmethod
    def of(cls, model_config: Any) -> Shape:
        """Read the sizes from a transformers configuration. Defaults: head size hidden / heads, MLP size 4 * hidden."""

        def size(name: str, default: int) -> int:
            return size_of(model_config, name) or default

        hidden, heads = size("hidden_size", 0), size("num_attention_heads", 1)
        head, inner = size("head_dim", hidden // heads), size("intermediate_size", 4 * hidden)
        experts = size("num_experts_per_tok", 0)
        if experts:
            inner = experts * size("moe_intermediate_size", inner)
        text, family = model_config.get_text_config(), getattr(model_config, "model_type", "")
        slides = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
        capped = getattr(text, "attn_logit_softcapping", None)
        return cls(
            layers=size("num_hidden_layers", 0), hidden=hidden, intermediate=inner, queries=heads * head,
            keys=size("num_key_value_heads", heads) * head, head=head, vocabulary=size("vocab_size", 0),
            tied=bool(getattr(model_config, "tie_word_embeddings", False)), experts=experts,
            gated=GATED.get(family, 4), norms=NORMS.get(family, 2),
            window=size("sliding_window", 0) if slides else 0,
            copies=bool(capped or getattr(text, "attention_dropout", None)), capped=heads if capped else 0,
        )  # fmt: skip

    def split(self, ranks: int) -> Shape:
        names = ("intermediate", "queries", "capped", "vocabulary")
        parts = {name: -(-getattr(self, name) // ranks) for name in names}
        return replace(self, **parts, keys=max(self.keys // ranks, self.head))

    def on_row_ranks(self, ranks: int) -> Shape:
        """Return the sizes per token of a rank's share, if ``ranks`` ranks divide each row (sequence parallelism).

        If ``ranks`` doesn't divide the number of query or key-value heads, the sizes include copied or filler heads.
        """
        heads, keys = self.queries // self.head, max(self.keys // self.head, 1)
        if heads % ranks == 0 and keys % ranks == 0:
            return self
        if heads % ranks == 0 and ranks % keys == 0:  # Each rank has a copy of one key-value head.
            return replace(self, keys=ranks * self.head)
        filled = -(-heads // ranks) * ranks * self.head
        return replace(self, queries=filled, keys=filled)


class CopiedKeys(NamedTuple):
    """Counts of keys, copied keys, attention scores and padding rows in attention's memory, each per token of a row."""

    kept: float = 0.0  # Copied keys that every layer keeps for the backward.
    inside: float = 1.0  # Keys, with copies, in memory while one layer's attention runs.
    scores: float = 0.0  # Attention scores of each head in every layer.
    segment: float = 0.0  # Part of ``scores`` that belongs to the longest prompt or completion.
    padding: float = 0.0  # Rows of padding in flash attention's backward.


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: int  # Tokens of the longest prompt.
    completion: int  # Tokens of the longest completion.
    group: int  # Completions that share a prompt in a packed row. 1 if rows are padded.

    def copied_keys(self, shape: Shape, tokens: int, itemsize: int, device: str) -> CopiedKeys:
        scores = (0.0, 0.0)
        if shape.capped:
            many = min(self.group, max(1.0, (tokens - self.prompt) / self.completion))
            one = self.completion * (self.prompt + self.completion)
            whole = self.prompt + many * self.completion
            scores = (self.prompt**2 + many * one) / whole, max(self.prompt**2, one) / whole
        if self.group == 1:
            return CopiedKeys(0.0, 1.0, *scores)
        windowed = 0 < shape.window < self.prompt + self.completion
        copies = itemsize != 2 if device == "cuda" else windowed or self.prompt < IN_PLACE_FROM
        if shape.copies or copies:
            joined = self.joined_keys(tokens)
            return CopiedKeys(joined, joined, *scores)
        count, short = self._short(tokens)
        padding = FLASH_ROWS * (1 + count) / (self.prompt + count * short) if device == "cuda" else 0.0
        return CopiedKeys(0.0, self.joined_keys(tokens, shape.window) if windowed else 1.0, padding=padding)

    def joined_keys(self, tokens: int, window: int = 0) -> float:
        """Return the number of keys in memory per token of a row, if each completion copies its prompt's keys. With a
        ``window``, a completion copies at most the prompt's last ``window`` - 1 keys."""
        if self.group == 1:
            return 1.0
        count, short = self._short(tokens)
        seen = min(self.prompt, window - 1) if window else self.prompt
        return (self.prompt + count * (seen + short)) / (self.prompt + count * short)

    def prompts_share(self, tokens: int) -> float:
        count, short = self._short(tokens)
        return self.prompt / (self.prompt + count * short)

    def _short(self, tokens: int) -> tuple[int, int]:
        """Return the number of short completions (see `SHORT`) that share a prompt in a row, and the tokens of each."""
        short = max(1, self.completion // SHORT)
        return min(self.group, max(1, (tokens - self.prompt) // short)), short


def layer_bytes(shape: Shape, itemsize: int, copied: float = 0.0) -> float:
    """Compute the bytes per token that one layer keeps for the backward, as in arXiv 2205.05198 (section 4.1).

    An RMSNorm keeps its input in float32, the normalised input, and the norm's output. Fused attention keeps the
    keys, the values, and three tensors of the queries' size. Attention that copies keys keeps ``copied`` more keys
    and values per token. Most MLPs keep gate, activated gate, up and product. In a mixture of experts, each expert
    that a token goes through also keeps the expert's input and output. Soft-capped scores aren't included.
    """
    norms = shape.norms * shape.hidden * (4 + 2 * itemsize)
    mlp = shape.gated * shape.intermediate + 2 * shape.experts * shape.hidden
    return norms + itemsize * (3 * shape.queries + (2 + 2 * copied) * shape.keys + mlp)


def again(shape: Shape, checkpointing: int) -> int:
    """Count the layers with activation checkpointing, which keep only their input for the backward."""
    return -(-shape.layers // checkpointing) if checkpointing else 0


def kept_by_layers(
    shape: Shape, itemsize: int, checkpointing: int, copied: CopiedKeys = CopiedKeys(), on_host: bool = False
) -> tuple[float, float]:
    """Return bytes per token: (activations that all layers keep on the device, activations of one recomputed layer)."""
    layer = layer_bytes(shape, itemsize, copied.kept) + SCORE * shape.capped * copied.scores
    twice = again(shape, checkpointing)
    inputs = min(twice, left_on_device().inputs) if on_host else twice
    return (shape.layers - twice) * layer + inputs * shape.hidden * itemsize, layer if twice else 0.0


def left_on_device() -> Any:
    """Return the extension's object that estimates the device memory of offloaded data (hook "left_on_device").

    The object's attribute ``inputs`` is the number of offloaded layer inputs on the device at once. Its methods:
    - ``state(nbytes)``: bytes of device buffers for ``nbytes`` of optimizer state.
    - ``sums(nbytes)``: bytes of device buffers for ``nbytes`` of gradient sums.
    - ``on_way(gradients, largest)``: peak bytes of gradients on the device, while a backward sends gradients to the
      host. ``gradients``: bytes of all gradients. ``largest``: bytes of the largest gradient.
    """
    (left,) = registry.hooks("left_on_device")
    return left


class Trained(NamedTuple):
    head: bool = True  # Whether the output head is trained.
    adapted: bool = False  # Whether most parameters are frozen, as with LoRA.
    inputs_on_host: bool = False  # Whether inputs of checkpointed layers are in host memory.
    on_way: int = 0  # Maximum bytes of gradients in transfer to the host. They count as gradients.


def activation_bytes(
    shape: Shape, tokens: int, itemsize: int, checkpointing: int, device: str, copied: CopiedKeys = CopiedKeys(),
    trained: Trained = Trained(),
) -> int:  # fmt: skip
    """Estimate the peak bytes of one forward and backward, without weights and accumulated gradients.

    The peak is the largest of three moments of the backward:
    - Head: all layers' activations, the final norm's activations, the head's input and the input's gradient, two
      float32 tiles of logits (`label_logprobs`), and the head weight's gradient. The plan's gradients include
      `Trained.on_way` for transfers to the host. No transfer has started yet, so these bytes are subtracted.
    - Last layer: all layers' activations, the last layer's recomputed activations and gradients, and the gradient of a
      tied head's weight.
    - Embedding: the gradients with respect to its output, and to its weight in the weight's dtype and in float32. A
      tied weight has three float32 gradients: from the head, from the embedding, and their sum.

    tests/policy/test_fake_gpu.py counts these bytes on fake CUDA tensors.
    """
    kept, twice = kept_by_layers(shape, itemsize, checkpointing, copied, trained.inputs_on_host)
    weight = 4 * shape.vocabulary * shape.hidden if trained.head else 0
    head = tokens * shape.hidden * (8 + 3 * itemsize) + 2 * 4 * TILE_ELEMENTS.get(device, 2**24) + weight
    # Peak of gradients inside one layer: in its MLP, or in its attention after the MLP's activations are freed. The MLP
    # has the gradients of gate and up, or the product's gradient and a LoRA adapter's float32 input.
    inner, joined = max(itemsize, 4) if trained.adapted else itemsize, copied.inside
    mlp = (itemsize + inner) * shape.intermediate + itemsize * 2 * max(shape.experts, 1) * shape.hidden
    attention = itemsize * (
        joined * 2 * shape.keys - shape.gated * shape.intermediate - 2 * shape.experts * shape.hidden
    )
    if device == "cuda":
        # Flash attention's backward sums queries' gradients in float32. It has keys' gradients for each query head.
        spread = 0 if shape.keys == shape.queries else itemsize * joined * 2 * shape.queries
        widened = -(-shape.head // FLASH_HEAD_STEP) * FLASH_HEAD_STEP / max(shape.head, 1)
        attention += 4 * shape.queries * widened * (1 + copied.padding) + spread
    attention += SCORE * shape.capped * copied.segment
    inside = tokens * (twice + max(mlp, attention)) + (weight if shape.tied else 0)
    embedding = tokens * shape.hidden * itemsize + weight * (3 if shape.tied else 1 + itemsize / 4)
    return int(max(tokens * kept + max(head - trained.on_way, inside), embedding))


@dataclass(frozen=True, slots=True)
class CacheNeed:
    per_token: int  # Bytes of keys and values per token.
    least: int  # Bytes for one sequence of maximum length.
    wanted: int  # Bytes for all sequences of a generation at maximum length.

    @classmethod
    def of(cls, shape: Shape, itemsize: int, length: int, sequences: int) -> CacheNeed:
        """Compute the KV cache's bytes for ``sequences`` sequences of ``length`` tokens, ignoring sliding windows."""
        per_token = 2 * shape.layers * shape.keys * itemsize
        # vLLM reserves one block. The last block of a sequence is partly empty.
        return cls(per_token, (length + 2 * BLOCK) * per_token, (sequences + 1) * (length + BLOCK) * per_token)
