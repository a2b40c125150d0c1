"""The policy: its weights, and the way from a group of completions to the log-probabilities of their tokens.

    groups -> `packing` -> MicroBatch -> `logprobs` (`attention`, or `padded`) -> log-probability of each label

`loading` makes the policy and its tokenizer, `lora` knows its adapter, `row_proof` proves on a few tokens which rows it
takes, `reference` is the model that the KL term holds it to, `teacher` one that it learns from, `teacher_head` what
that says of its tokens. `routing` says how a mixture's routers spread a row over
its experts, `router_replay` has its tokens go to those that the engine chose, `images` brings pictures into a row.
`lora_inputs` keeps what an adapter needs of its layers, `sinks` has flash attention see sinks.
`quantized` knows how a base is quantised, `quantized_layers` what its layers then amount to; `supported` says what
can't be trained. `layers` compiles the decoder layers, `liger` puts other kernels into them. `outline` is a model's
parameters without their values; `sending` brings small tensors to the device.
"""
