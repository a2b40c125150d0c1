"""The process and its imports: settings that torch and vLLM read once, objects found by name, host memory of a GPU."""
