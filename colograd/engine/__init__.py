"""The vLLM engine in the trainer's process. Only folders named `engine` may import vllm; a test checks the imports.

`protocol` is the interface of an engine, and of extensions that change the engine. `vllm_engine` samples with vLLM.
`loaded` builds vLLM, stamps it with the optimizer step of its weights, and frees its KV cache. `arguments` translates
the configuration into arguments of `vllm.LLM`. `sampling` translates the configuration into sampling parameters, and
chooses the prompts that start first. `building` patches vLLM, mostly while it is built. `closing` shuts an
engine down, and keeps the process groups that other engines need. `tensors` finds vLLM's tensors by name."""
