"""vLLM in this process. No other folder imports vllm.

`vllm_engine` builds, steps and stamps it; `arguments` are the configuration as arguments of `vllm.LLM`, `sampling` as
sampling parameters; `lora_slots` and `cpu_kernels` are what an engine with adapters or on a CPU needs beside; and
`queue_order` says which prompts start first.
"""
