"""Mistakes that only a GPU shows, made in a copy of the package: does the device of `host_cuda` notice them?

    python tests/helpers/host_cuda_mutants.py FOLDER      # prints a dictionary per mutant

One process imports everything once, and forks for each mutant.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import host_cuda_cases
from paths import ROOT


@dataclass(frozen=True)
class Mutant:
    """A change of one file of the package, and the case that should notice it."""

    kind: str
    file: str
    before: str
    after: str
    case: str


MUTANTS = (
    Mutant(
        "the value that every start compares stays on the host", "weights/mapping.py",
        "self.held.to(engine_value.device)", "self.held", "bfloat16",
    ),
    Mutant(
        "a dropped `.to`", "extensions/reference/model.py",
        "torch.lerp(own.to(theirs.device), theirs.detach(), alpha)", "torch.lerp(own, theirs.detach(), alpha)",
        "reference",
    ),
    Mutant(
        "a host tensor indexed by a device tensor", "extensions/recording/recorder.py",
        "for _, logprobs in kept]).cpu()\n",
        "for _, logprobs in kept]).cpu()\n"
        "    values = values[torch.arange(len(values), device=kept[0][1].device)]\n", "bfloat16",
    ),
    Mutant(
        "a missing wait after a non-blocking copy", "extensions/offload/host_stream.py",
        "self.sent().synchronize()", "self.sent()", "streamed",
    ),
    Mutant(
        "a buffer left behind by a move", "extensions/distillation/teacher.py",
        "buffer.data = buffer.data.to(config.device)", "pass", "lora and teacher",
    ),
    Mutant(
        "a wrong dtype in a kernel's call", "policy/merged_attention.py",
        "starts = (next(sent).to(torch.int32),", "starts = (next(sent),", "bfloat16",
    ),
    Mutant(
        "a generator of the other device", "extensions/lora/weights.py",
        "torch.rand(shape, generator=generator)",
        "torch.rand(shape, generator=generator, device=slots[0].destination.device)", "lora and teacher",
    ),
    Mutant(
        "pinned memory reused too early", "policy/sending.py",
        "        tensor = tensor.pin_memory()\n",
        "        place = _places.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor, pin_memory=True))\n"
        "        tensor = place.copy_(tensor)\n", "bfloat16",
    ),
    Mutant(
        "a stale pointer after a move", "extensions/offload/adamw.py",
        "tensor.data = torch.empty_like(tensor, device=device)",
        "tensor.detach().data = torch.empty_like(tensor, device=device)",
        "lora and teacher",
    ),
    Mutant(
        "a wait in the decode loop", "engine/vllm_engine.py",
        "outputs = self.core.step()\n", "outputs = self.core.step()\n        torch.cuda.synchronize()\n", "bfloat16",
    ),
    Mutant(
        "an adapter left on the host", "weights/selection.py",
        "        policy.to(device)  #",
        "        for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]:\n"
        "            tensor.data = tensor.data if 'lora_' in name else tensor.data.to(device)\n"
        "        pass  #", "lora and teacher",
    ),
)  # fmt: skip
EXTRA = {"policy/sending.py": "\n_places: dict = {}\n"}


def changed_package(mutant: Mutant, folder: Path) -> Path:
    """Return a folder with a copy of the package that has the mutant's change."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "colograd", folder / "colograd", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "colograd" / mutant.file
    text = file.read_text()
    assert text.count(mutant.before) == 1, f"{mutant.file} no longer has {mutant.before!r} once"
    file.write_text(text.replace(mutant.before, mutant.after) + EXTRA.get(mutant.file, ""))
    return folder


def run(mutant: Mutant, folder: Path) -> dict[str, str]:
    """Run the mutant's case in a fork. `shown` is the rule it breaks, or the error, or empty."""
    package, models = changed_package(mutant, folder / "mutant"), folder / "models"
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        verdict = "the process ended"
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] in ("colograd", "tiny", "tiny_images")]:
                del sys.modules[name]
            sys.path.insert(0, str(package))
            import colograd

            assert Path(colograd.__file__).is_relative_to(package), colograd.__file__
            host_cuda_cases.shorten()
            verdict = "; ".join(host_cuda_cases.faults(host_cuda_cases.run(mutant.case, models, folder / "run")))
        except BaseException as error:
            verdict = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, verdict.encode()[-2000:])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        verdict = answer.read()
    os.waitpid(child, 0)
    shutil.rmtree(folder / "run", ignore_errors=True)
    return {"kind": mutant.kind, "shown": verdict}


def main(folder: Path) -> None:
    host_cuda_cases.prepare()
    for mutant in MUTANTS:
        print(json.dumps(run(mutant, folder)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
