"""Bytes that follow from a model's shape: activations, the engine's steps, the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..engine.arguments import MOST_SEQUENCES
from ..policy.attention import IN_PLACE_FROM
from ..policy.head import TILE_ELEMENTS
from ..runtime import registry
from ..runtime.sizes import size_of

ENGINE_TOKENS = 16384  # tokens of one engine step: vLLM's default for `LLM` on large GPUs
BLOCK = 128  # most tokens of a KV block in vLLM: fewer in most attention backends
# Where keys are copied, completions are planned with 1/SHORT of the longest, because short completions copy their
# prompt's keys more often. Rows of still shorter completions are rare, and are packed again if memory runs out.
SHORT = 8
# Flash attention's backward sums queries' gradients in rows of whole blocks, and heads of a multiple of a number.
FLASH_ROWS, FLASH_HEAD_STEP = 128, 32
SCORE = 8  # bytes kept per soft-capped score: the tanh, the softmax in float32 and in the row's dtype
GATED = {"gpt_oss": 7}  # clamps its gate, and multiplies it by its own sigmoid; see `Shape.gated`
NORMS = {"gemma2": 4, "gemma3": 4, "gemma3_text": 4}  # also behind attention and MLP


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder, in elements."""

    layers: int
    hidden: int
    intermediate: int  # total size of the MLPs that one token goes through
    queries: int  # heads * head size
    keys: int  # key-value heads * head size
    head: int  # size of one head
    vocabulary: int
    tied: bool = False  # the head's weight is the embedding's
    experts: int = 0  # experts of a mixture that one token goes through
    gated: int = 4  # tensors of the MLP's size that are kept: gate, activated gate, up, product
    norms: int = 2  # norms of a layer
    window: int = 0  # most tokens that sliding-window layers see; 0: all layers see all tokens
    copies: bool = False  # whether attention copies keys (soft caps, dropout)
    capped: int = 0  # heads with scores in memory, as no fused kernel takes soft caps

    @classmethod
    def of(cls, model_config: Any) -> Shape:
        """Read a transformers configuration. A missing size is derived as in GPT-2."""

        def size(name: str, default: int) -> int:
            return size_of(model_config, name) or default

        hidden, heads = size("hidden_size", 0), size("num_attention_heads", 1)
        head, inner = size("head_dim", hidden // heads), size("intermediate_size", 4 * hidden)
        experts = size("num_experts_per_tok", 0)
        if experts:
            inner = experts * size("moe_intermediate_size", inner)
        text, family = model_config.get_text_config(), getattr(model_config, "model_type", "")
        slides = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
        return cls(
            layers=size("num_hidden_layers", 0),
            hidden=hidden,
            intermediate=inner,
            queries=heads * head,
            keys=size("num_key_value_heads", heads) * head,
            head=head,
            vocabulary=size("vocab_size", 0),
            tied=bool(getattr(model_config, "tie_word_embeddings", False)),
            experts=experts,
            gated=GATED.get(family, 4),
            norms=NORMS.get(family, 2),
            window=size("sliding_window", 0) if slides else 0,
            copies=any(getattr(text, name, None) for name in ("attn_logit_softcapping", "attention_dropout")),
            capped=heads if getattr(text, "attn_logit_softcapping", None) else 0,
        )

    def split(self, ranks: int) -> Shape:
        """Return the shape on one of ``ranks`` that split each layer; every rank has at least one key-value head."""
        return replace(
            self,
            intermediate=-(-self.intermediate // ranks),
            queries=-(-self.queries // ranks),
            capped=-(-self.capped // ranks),
            keys=max(self.keys // ranks, self.head),
            vocabulary=-(-self.vocabulary // ranks),
        )

    def on_row_ranks(self, ranks: int) -> Shape:
        """Return the shape per token of a rank's own, if ``ranks`` ranks share out a row's tokens and attention's
        heads. If ``ranks`` doesn't divide the key-value heads, a rank has more than its share."""
        heads, keys = self.queries // self.head, max(self.keys // self.head, 1)
        if heads % ranks == 0 and keys % ranks == 0:
            return self
        if heads % ranks == 0 and ranks % keys == 0:  # one key-value head on each rank
            return replace(self, keys=ranks * self.head)
        filled = -(-heads // ranks) * ranks * self.head
        return replace(self, queries=filled, keys=filled)


class CopiedKeys(NamedTuple):
    """Copies of keys that attention makes, and scores in memory, per token of a row."""

    kept: float = 0.0  # copied keys that every layer keeps for the backward
    inside: float = 1.0  # keys of one layer's attention while it runs, with its own
    scores: float = 0.0  # scores of each head of every layer
    segment: float = 0.0  # the longest segment's part of ``scores``
    padding: float = 0.0  # rows that flash attention's backward adds for a row's segments


@dataclass(frozen=True, slots=True)
class Lengths:
    """The longest prompt and completion of a row, in tokens."""

    prompt: int
    completion: int
    group: int  # completions that share a prompt in a row; 1 if rows are padded

    def copied_keys(self, shape: Shape, tokens: int, itemsize: int, device: str) -> CopiedKeys:
        """Compute the copies that attention makes: none if it reads a prompt's keys in place (see
        `policy.attention`). Scores are of a row of long completions."""
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
        """Compute the keys per token of a row, if each completion's are joined with its prompt's (in a ``window``, the
        last of them): 1 for one sequence, nearly 9 for 8 completions far shorter than their prompt."""
        if self.group == 1:
            return 1.0
        count, short = self._short(tokens)
        seen = min(self.prompt, window - 1) if window else self.prompt
        return (self.prompt + count * (seen + short)) / (self.prompt + count * short)

    def prompts_share(self, tokens: int) -> float:
        count, short = self._short(tokens)
        return self.prompt / (self.prompt + count * short)

    def _short(self, tokens: int) -> tuple[int, int]:
        """Return the number of short completions of one prompt in a row of ``tokens``, and the tokens of each."""
        short = max(1, self.completion // SHORT)
        return min(self.group, max(1, (tokens - self.prompt) // short)), short


def layer_bytes(shape: Shape, itemsize: int, copied: float = 0.0) -> float:
    """Compute the bytes that one layer keeps for the backward pass, per token, as in arXiv 2205.05198 (section 4.1).

    RMSNorms: float32 input, normalised and scaled output. Fused attention: queries, keys and values, twice (and
    ``copied`` more of the keys and values), and its output. MLP: gate, activated gate, up, product; in a mixture also
    its input and output, once per expert.
    """
    norms = shape.norms * shape.hidden * (4 + 2 * itemsize)
    mlp = shape.gated * shape.intermediate + 2 * shape.experts * shape.hidden
    return norms + itemsize * (3 * shape.queries + (2 + 2 * copied) * shape.keys + mlp)


def again(shape: Shape, checkpointing: int) -> int:
    """Count the layers that are computed again. Each of them keeps only its input."""
    return -(-shape.layers // checkpointing) if checkpointing else 0


def kept_by_layers(
    shape: Shape,
    itemsize: int,
    checkpointing: int,
    copied: CopiedKeys = CopiedKeys(),  # noqa: B008  # immutable
    on_host: bool = False,
) -> tuple[float, float]:
    """Compute the bytes per token that all layers keep, and the bytes of one layer that is computed again. Each
    ``checkpointing``-th layer keeps only its input; ``on_host`` all of these inputs but a few are on the host."""
    layer = layer_bytes(shape, itemsize, copied.kept) + SCORE * shape.capped * copied.scores
    twice = again(shape, checkpointing)
    inputs = min(twice, left_on_device().inputs) if on_host else twice
    return (shape.layers - twice) * layer + inputs * shape.hidden * itemsize, layer if twice else 0.0


def left_on_device() -> Any:
    """Return the offer at the seam "left_on_device": the bytes that parts of training in host memory take on the device
    while they pass through.

    ``inputs``: number of layers' inputs on the device at once. ``state(nbytes)``: of an optimizer's state.
    ``sums(gradients)``: of sums in transfer. ``on_way(gradients, largest)``: of gradients in transfer.
    """
    (left,) = registry.hooks("left_on_device")
    return left


class Trained(NamedTuple):
    """The trained parameters and parts in host memory, as far as activations depend on them."""

    head: bool = True
    adapted: bool = False  # most parameters are frozen
    inputs_on_host: bool = False  # inputs of layers that are computed again are on the host
    on_way: int = 0  # most bytes of gradients on their way to the host while layers go backward; counted elsewhere


def activation_bytes(
    shape: Shape,
    tokens: int,
    itemsize: int,
    checkpointing: int,
    device: str,
    copied: CopiedKeys = CopiedKeys(),  # noqa: B008  # immutable
    trained: Trained = Trained(),  # noqa: B008  # immutable
) -> int:
    """Estimate the peak of one forward and backward, without weights and gradients: the largest of three moments.

    In the head: the layers' activations, the final norm, the head's input and its gradient, two float32 tiles of
    logits (`logprobs`), and the gradient of the head's weight. In the last layer: its gradients, and for a tied head
    also the weight's gradient, which waits for the embedding's. In the embedding: its gradient in its dtype and in
    float32; if tied, both and their sum in float32. If gradients go to the host, none is on its way in the head.
    Counted on fake CUDA tensors (tests/policy/test_fake_gpu.py).
    SmolLM2-135M in bfloat16 on a CPU: 956 and 1,740 MiB for 1,024 and 2,048 tokens (measured: 953, 1,697); with
    checkpointing 325 for 1,024 (272).
    """
    kept, twice = kept_by_layers(shape, itemsize, checkpointing, copied, trained.inputs_on_host)
    weight = 4 * shape.vocabulary * shape.hidden if trained.head else 0
    head = tokens * shape.hidden * (8 + 3 * itemsize) + 2 * 4 * TILE_ELEMENTS.get(device, 2**24) + weight
    # The peak of gradients inside one layer, per token: in its MLP, or in its attention after the MLP's activations are
    # freed. The MLP has the gradients of gate and up, or the product's gradient and an adapter's float32 input.
    inner, joined = max(itemsize, 4) if trained.adapted else itemsize, copied.inside
    mlp = (itemsize + inner) * shape.intermediate + itemsize * 2 * max(shape.experts, 1) * shape.hidden
    attention = itemsize * (
        joined * 2 * shape.keys - shape.gated * shape.intermediate - 2 * shape.experts * shape.hidden
    )
    if device == "cuda":
        # Flash attention's backward sums queries' gradients in float32, and keys' and values' once per query head.
        spread = 0 if shape.keys == shape.queries else itemsize * joined * 2 * shape.queries
        widened = -(-shape.head // FLASH_HEAD_STEP) * FLASH_HEAD_STEP / max(shape.head, 1)
        attention += 4 * shape.queries * widened * (1 + copied.padding) + spread
    attention += SCORE * shape.capped * copied.segment
    inside = tokens * (twice + max(mlp, attention)) + (weight if shape.tied else 0)
    embedding = tokens * shape.hidden * itemsize + weight * (3 if shape.tied else 1 + itemsize / 4)
    return int(max(tokens * kept + max(head - trained.on_way, inside), embedding))


def engine_bytes(shape: Shape, sequences: int, itemsize: int) -> int:
    """Estimate the engine's bytes without weights and KV cache: activations of one layer, and three float32 tensors of
    logits."""
    step = ENGINE_TOKENS * itemsize * (4 * shape.hidden + 2 * shape.intermediate)
    return step + 3 * 4 * min(sequences, MOST_SEQUENCES) * shape.vocabulary


@dataclass(frozen=True, slots=True)
class CacheNeed:
    per_token: int
    least: int  # one sequence at full length
    wanted: int  # every sequence of a generation at full length: more would never be used

    @classmethod
    def of(cls, shape: Shape, itemsize: int, length: int, sequences: int) -> CacheNeed:
        """Compute the need of ``sequences`` sequences of up to ``length`` tokens; an upper bound with window layers."""
        per_token = 2 * shape.layers * shape.keys * itemsize
        # vLLM keeps a block for itself, and a sequence's last block is partly empty.
        return cls(per_token, (length + 2 * BLOCK) * per_token, (sequences + 1) * (length + BLOCK) * per_token)
