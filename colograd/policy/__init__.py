"""The policy: its weights, and the way from a group of completions to the log-probabilities of their tokens.

    groups -> `packing` -> MicroBatch -> `logprobs` (`attention`, or `padded`) -> log-probability of each label

`loading` makes the policy and its tokenizer. `lora` describes its adapter, and `lora_inputs` saves the layer inputs
that an adapter's backward needs. `row_proof` proves on a few tokens whether rows can be packed.
`reference` is the model of the KL term, `teacher` the model of a distillation, `teacher_head` its logits.
`routing` measures how a mixture's routers spread a row over the experts, and `router_replay` sends tokens to the
engine's experts. `images` puts pictures into a row. `quantized` describes how a base is quantised, `quantized_layers`
dequantises its layers. `supported` rejects models that can't be trained. `layers` compiles the decoder layers, `liger`
replaces their kernels. `outline` has a model's parameters without their values. `sending` copies small tensors to the
device.
"""
