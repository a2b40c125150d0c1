"""The policy: its weights, and the way from a group of completions to the log-probabilities of their tokens.

    groups -> `packing` -> MicroBatch -> `logprobs` (`attention`, or `padded`) -> log-probability of each label

`loading` makes the policy and its tokenizer, `supported` has the checks and what options change there. `lora` describes
its adapter. `row_proof` proves on a few tokens whether rows can be packed.
`reference` is the model of the KL term. `towers` names the parts of a model that reads more than text, `packed_weights`
finds quantised weights. `layers` compiles the decoder layers. `outline` has a model's parameters without their values.
`sending` copies small tensors to the device.
"""
