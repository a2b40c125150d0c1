"""vLLM in this process. Only folders of this name import vllm, here and in extensions; a test holds that.

`protocol` is the interface of an engine. `vllm_engine` builds vLLM, steps it, stamps it with the step of its weights,
and puts it to sleep. `feature` is the interface of its optional parts, which extensions offer. `arguments` translates
the configuration into arguments of `vllm.LLM`, `sampling` into sampling parameters; it also chooses the prompts that
start first. `building` sets the conditions under which vLLM is built, and replaces parts of vLLM. `cpu_layers` and
`model_classes` mend layers and models. `closing` shuts an engine down, and keeps the state that other engines need.
`tensors` finds vLLM's tensors by name. `load` calls listeners after each step, and reads the engine's load.
`leading` keeps the ranks of one engine in step: the first
rank decides, the others follow.
"""
