"""vLLM in this process. This folder alone imports vllm; a test holds that.

`vllm_engine` builds the engine, steps it, stamps it with the step of its weights, and puts it to sleep. `arguments`
translates the configuration into arguments of `vllm.LLM`, `sampling` into sampling parameters. `building` sets the
conditions under which vLLM is built, and replaces parts of vLLM. `experts` computes a mixture's experts on a CPU.
`quantized_layers` multiply with the policy's quantised weights. `bidirectional_images` lets an image's tokens attend to
each other, and `whole_pictures` has such an image read in one step. `closing` shuts an engine down, and keeps the state
that other engines need. `queue_order` chooses the prompts that start first. `load` reports the engine's load after each
step. `routed` records the experts that routers chose for each token, and `kept_tokens` the tokens that truncated
sampling kept. `images` passes images to vLLM. `speculation` compares vLLM's drafts with the sampled tokens. `leading`
keeps the ranks of one engine in step: the first rank decides, the others follow.
"""
