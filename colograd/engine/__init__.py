"""The vLLM engine in the trainer's process. Only folders named `engine` may import vllm; a test checks the imports.

`protocol` is the interface of an engine. `vllm_engine` samples with vLLM. `loaded` builds vLLM, stamps the engine with
the optimizer step of its weights, and puts the engine to sleep. `feature` is the interface of extensions that change
the engine. `arguments` translates the configuration into arguments of `vllm.LLM`. `sampling` translates the
configuration into sampling parameters, and chooses the prompts that start first. `building` patches vLLM while it is
built. `cpu_layers` and `model_classes` correct vLLM's layers and models. `closing` shuts an engine down, and keeps the
process groups that other engines need. `tensors` finds vLLM's tensors by name. `load` reads the number of running and
waiting sequences after each step. `leading` repeats the first rank's calls of vLLM on the engine's other ranks.
"""
