"""The process: environment variables that torch and vLLM read once, imports by path, extensions, memory, the Hub."""
