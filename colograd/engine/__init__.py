"""The vLLM engine in the trainer's process. Only folders named `engine` may import vllm; a test checks the imports."""
