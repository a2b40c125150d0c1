"""The policy (the model to train), and the path from groups of completions to the log-probabilities of their tokens:

    groups -> `packing` -> MicroBatch -> `logprobs` (`attention`, or `padded`) -> log-probability of each label

`loading` loads the policy and its tokenizer, `supported` checks whether a model can be trained, `lora` describes the
policy's adapter and quantised weights. `row_proof` checks on a few tokens whether rows can be packed. `second_models`
runs reference and teacher models. `towers` names the vision and audio parts of a model. `layers` compiles decoder
layers. `sending` copies small tensors to the device.
"""
