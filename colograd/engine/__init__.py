"""vLLM in this process. This folder alone imports vllm; a test holds that.

`vllm_engine` builds and steps it, stamps it with the step of its weights, and puts it to sleep. `arguments` are the
configuration as arguments of `vllm.LLM`, `sampling` as sampling parameters. `building` sees to what must hold while it
is built, and replaces the parts of vLLM that are in the way (`experts` computes those of a mixture, `quantized_layers`
multiply with the policy's quantised weights, `bidirectional_images` is the attention of pictures whose tokens see each
other, which `whole_pictures` has read in one step); `closing` to what ends with it, and what doesn't. `queue_order`
says which prompts start first, `load` what the engine has to do at each of its steps, `routed` which experts it chose
for each token, `kept_tokens` what truncated sampling left for it, `images` hands pictures over. `speculation` compares
vLLM's drafts with the tokens that are sampled. `leading` keeps the ranks of one engine in step: the first one decides,
the others follow.
"""
